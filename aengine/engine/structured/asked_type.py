"""The ``output_type`` of a request: from what a caller gives to the options that admission takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import InvalidRequestError
from ...params import OnUnsupported, SamplingParams, StructuredOutput, shown

if TYPE_CHECKING:
    from .output_type import OutputType

__all__ = ["AskedType", "check_on_unsupported", "constraint_of", "with_output_type"]


class AskedType(NamedTuple):
    """A type whose schema has not been made yet: that may take too long for the loop."""

    wanted: Any
    on_unsupported: OnUnsupported

    def described(self) -> tuple[OutputType, StructuredOutput]:
        """The type, and the constraint that it is. For a thread. Raises InvalidRequestError."""
        from .output_type import OutputType

        try:
            known = OutputType.of(self.wanted)
        except (SystemExit, KeyboardInterrupt) as error:  # the type's own hooks may raise these
            raise InvalidRequestError(f"output_type can't be described: {error!r}", param="output_type") from error
        return known, constraint_of(known, self.on_unsupported)


def with_output_type(
    params: SamplingParams | None, output_type: Any, on_unsupported: OnUnsupported
) -> tuple[SamplingParams, dict[str, Any]]:
    """Return the parameters, and the arguments of `Admission.submit` that say the output type.

    Raises InvalidRequestError.
    """
    if params is None:
        params = SamplingParams()
    check_on_unsupported(on_unsupported)
    if output_type is None and on_unsupported != "error":
        raise InvalidRequestError(
            "on_unsupported is about output_type, and there is none; a StructuredOutput has its own",
            param="on_unsupported",
        )
    if output_type is None or not isinstance(params, SamplingParams):  # params of a wrong type are refused later
        return params, {}
    from .output_type import OutputType

    known = OutputType.known(output_type)
    if not params.detokenize:
        raise InvalidRequestError("output_type needs the text: detokenize must be True", param="detokenize")
    if params.structured_output is not None:
        raise InvalidRequestError("give output_type or params.structured_output, not both", param="output_type")
    if known is None:  # the type is described later, in a thread
        return params, {"asked_type": AskedType(output_type, on_unsupported)}
    return params.replace(structured_output=constraint_of(known, on_unsupported)), {"output_type": known}


def constraint_of(known: OutputType, on_unsupported: OnUnsupported) -> StructuredOutput:
    return StructuredOutput(json_schema=known.schema_text, on_unsupported=on_unsupported)


def check_on_unsupported(value: object) -> None:
    """Raise InvalidRequestError unless the value is one that ``on_unsupported`` can have."""
    if value not in ("error", "relax"):
        raise InvalidRequestError(
            f"on_unsupported={shown(value)} is not valid: it must be 'error' or 'relax'", param="on_unsupported"
        )
