"""`tekken.json`, Mistral's own file of a byte-level BPE: tokens as bytes by rank, control tokens before them.

config            pattern, default_vocab_size, default_num_special_tokens
vocab             [{"rank": 256, "token_bytes": <base64>}, ...]      id: rank + the number of special tokens
special_tokens    [{"rank": 3, "token_str": "[INST]", "is_control": true}, ...]      id: rank; not in old files
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING

from ....checkpoint.value_reader import ValueReader, read_json
from ....errors import ModelLoadError
from ..token_text import gpt2_bytes
from .loaded import put_around
from .sentencepiece import check_pieces, every_merge

if TYPE_CHECKING:
    import tokenizers

_OLD_SPECIAL_TOKENS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""Special tokens of files that name none (versions 3 and 7), by id."""
_MOST_SPECIAL_TOKENS = 1 << 16  # Mistral's files have a thousand


def read_tekken(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Build the tokenizer; also return its special tokens by role. Raises ModelLoadError for a file that is damaged."""
    data = ValueReader(read_json(path), str(path))
    try:
        return _encoder(data)
    except ModelLoadError:
        raise
    except Exception as error:  # whatever the library raises for a vocabulary that does not fit together
        raise ModelLoadError(f"{path} can't be read as a tekken tokenizer: {error!r:.200}") from error


def _encoder(data: ValueReader) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    config = data.at("config")
    vocab_size = config.integer("default_vocab_size")
    num_special = config.integer("default_num_special_tokens", least=0, most=_MOST_SPECIAL_TOKENS)
    names = [f"<SPECIAL_{i}>" for i in range(num_special)]
    listed = data.objects("special_tokens")
    if data.raw("special_tokens") is None:
        names[: len(_OLD_SPECIAL_TOKENS)] = _OLD_SPECIAL_TOKENS
    for token in listed:
        names[token["rank"]] = token["token_str"]
    ordinary = {token["rank"] for token in listed if not token["is_control"]}
    entries = sorted(data.objects("vocab"), key=lambda token: token["rank"])[: max(0, vocab_size - num_special)]
    ranked = {base64.b64decode(token["token_bytes"]): token["rank"] for token in entries}
    letters = {byte: letter for letter, byte in gpt2_bytes().items()}

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    # The model's own ids begin after the special tokens, which are in its vocabulary too: added tokens keep their ids.
    ids = {spelled(token): rank + num_special for token, rank in ranked.items()}
    vocab = {name: i for i, name in enumerate(names)} | ids
    check_pieces(ids)
    encoder = Tokenizer(models.BPE(vocab, every_merge(ids, ids), ignore_merges=True))
    split = pre_tokenizers.Split(Regex(config.text("pattern")), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    encoder.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    encoder.decoder = decoders.ByteLevel()
    encoder.add_tokens([AddedToken(n, special=i not in ordinary, normalized=False) for i, n in enumerate(names)])
    roles = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    special_tokens = {role: name for role, name in roles.items() if name in names}
    put_around(encoder, special_tokens.get("bos_token"), None)
    return encoder, special_tokens
