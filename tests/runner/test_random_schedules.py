"""Random schedules (chunks, prefix hits, removal, preemption, rows and blocks used again) against one request alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from runner_fakes import FakeModel, expected_logits, make_runner, request

from aengine.ipc.messages import NewRequest, SchedulerOutput, int32
from aengine.kernels.gumbel import gumbel_sample

VOCAB, BLOCK_SIZE, NUM_BLOCKS, ROWS, MAX_LEN = 61, 4, 48, 6, 48


@dataclass
class Job:
    """A request as its host knows it."""

    tokens: list[int]
    num_prompt: int
    temperature: float
    seed: int
    row: int = -1
    computed: int = 0
    blocks: list[int] = field(default_factory=list)

    def expected(self) -> int:
        logits = expected_logits(self.tokens, VOCAB)
        if self.temperature == 0:
            return int(logits.argmax())
        seed, position = torch.tensor([self.seed]), torch.tensor([len(self.tokens)])
        return int(gumbel_sample(logits[None], torch.tensor([self.temperature]), seed, position)[0])


class Host:
    """Schedules at random. Blocks are counted, as prompts share them; freed ones are given out in the same step."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.free_rows = list(range(ROWS))
        self.users = [0] * NUM_BLOCKS
        self.running: list[Job] = []
        self.waiting: list[Job] = []

    def take(self, count: int) -> list[int] | None:
        free = [b for b, n in enumerate(self.users) if n == 0]
        if len(free) < count:
            return None
        taken = self.rng.sample(free, count)
        for block in taken:
            self.users[block] = 1
        return taken

    def drop(self, job: Job) -> int:
        self.running.remove(job)
        self.free_rows.append(job.row)
        for block in job.blocks:
            self.users[block] -= 1
        return job.row

    def arrive(self) -> None:
        prompt = [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 20))]
        if self.running and self.rng.random() < 0.5:  # begins like another
            prompt = self.rng.choice(self.running).tokens[: self.rng.randint(4, 20)] + prompt[:5]
        temperature = self.rng.choice([0.0, 1.0])
        self.waiting.append(Job(prompt, len(prompt), temperature, self.rng.randrange(-(2**63), 2**63)))

    def admit(self, job: Job) -> NewRequest | None:
        shared: list[int] = []
        for other in self.running:
            same = 0
            while same < min(other.computed, len(job.tokens) - 1) and other.tokens[same] == job.tokens[same]:
                same += 1
            if same // BLOCK_SIZE > len(shared):
                shared = other.blocks[: same // BLOCK_SIZE]
        job.computed = len(shared) * BLOCK_SIZE
        fresh = self.take(self.blocks_for(job, self.rng.randint(1, len(job.tokens) - job.computed)) - len(shared))
        if fresh is None:
            return None
        for block in shared:
            self.users[block] += 1
        job.blocks = shared + fresh
        job.row = self.free_rows.pop(self.rng.randrange(len(self.free_rows)))
        self.running.append(job)
        return request(
            job.row,
            job.tokens,
            job.blocks,
            num_prompt_tokens=job.num_prompt,
            num_computed_tokens=job.computed,
            temperature=job.temperature,
            seed=job.seed,
        )

    def blocks_for(self, job: Job, count: int) -> int:
        return -(-(job.computed + count) // BLOCK_SIZE)

    def schedule(self, step_id: int) -> tuple[SchedulerOutput, list[tuple[Job, int]]]:
        out = SchedulerOutput(step_id)
        for job in list(self.running):
            fate = self.rng.random()
            if len(job.tokens) >= MAX_LEN or fate < 0.04:
                out.removed.append(self.drop(job))
            elif fate < 0.08:
                out.removed.append(self.drop(job))
                self.waiting.append(job)
        if self.rng.random() < 0.4:
            self.arrive()
        while self.waiting and self.free_rows:
            new = self.admit(self.waiting[0])
            if new is None:
                break
            self.waiting.pop(0)
            out.new_requests.append(new)
        batch: list[tuple[Job, int]] = []
        for job in self.rng.sample(self.running, self.rng.randint(0, len(self.running))):
            count = self.rng.randint(1, len(job.tokens) - job.computed)
            more = self.take(max(0, self.blocks_for(job, count) - len(job.blocks)))
            if more is not None:
                job.blocks += more
                out.block_rows.extend([job.row] * len(more))
                out.block_ids.extend(more)
                batch.append((job, count))
        out.req_idx = int32(job.row for job, _ in batch)
        out.num_scheduled_tokens = int32(count for _, count in batch)
        return out, batch


@pytest.mark.parametrize("attempt", range(4))
def test_every_token_is_that_of_the_request_alone(rng: random.Random, attempt: int) -> None:
    host = Host(rng)
    runner = make_runner(
        FakeModel(VOCAB, NUM_BLOCKS, BLOCK_SIZE),
        VOCAB,
        max_num_seqs=ROWS,
        max_model_len=MAX_LEN,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
    )
    sampled = 0
    for step_id in range(250):
        out, batch = host.schedule(step_id)
        runner.execute_model(out)
        answer = runner.sample_tokens(None).get()
        assert answer.step_id == step_id and answer.errors == []
        for (job, count), token in zip(batch, answer.token_ids, strict=True):
            job.computed += count
            if job.computed < len(job.tokens):
                assert token == -1
            else:
                assert token == job.expected(), (step_id, job)
                job.tokens.append(token)
                sampled += 1
    assert sampled > 100
