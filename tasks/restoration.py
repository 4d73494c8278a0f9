"""Restoration preflight: both arms load one checkpoint, and the service shows what they loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from evidence import restoration
from evidence.canonical import canonical_bytes, digest
from evidence.gate import SourceRef
from evidence.store import encode_segment
from tasks.context import RunContext, settle_all
from tasks.datums import TrainedSequence, datum_of
from tasks.fixed_inputs import fixed_batch
from tasks.gate_answer import GateAnswer
from tasks.learner import Learner
from tasks.provenance import initialization_provenance
from tasks.trainer import Trainer

SCOPE = "float32 trainer log-probabilities of every target token of the fixed batch"


async def check_restoration(ctx: RunContext, learners: Mapping[str, Learner]) -> GateAnswer:
    """Load every arm's client from the initialization checkpoint and compare what they are.

    The clients stay open: they are the ones that are trained. Writes: loads, the output of the
    fixed batch, the provenance. Calls the service. Safe to repeat: an output that was captured
    before the first update is not captured again.
    """
    await settle_all([_capture(ctx, learner) for learner in learners.values()])
    provenance = initialization_provenance(ctx)
    name = f"initialization-provenance-{digest(provenance)[:12]}.json"
    path = ctx.run.write_file(name, canonical_bytes(provenance) + b"\n")
    result = restoration.validate(ctx.spec.raw, provenance)
    gate = result.to_gate((SourceRef(path, digest_of_file(ctx, path)),))
    return GateAnswer(gate, {"initialization_provenance": provenance})


async def _capture(ctx: RunContext, learner: Learner) -> None:
    """Score the fixed batch with the freshly loaded client."""
    if any(event["arm"] == learner.arm.name for event in ctx.run.events("initial_output")):
        return
    batch = fixed_batch(ctx)

    async def score(trainer: Trainer) -> list[NDArray[np.float32]]:
        return await trainer.forward([datum_of(sequence) for sequence in batch])

    outputs = await learner.do(0, "output on the fixed batch", score)
    record = {
        "arm": learner.arm.name,
        "batch_sha256": batch_sha256(batch),
        "output_sha256": output_sha256(outputs),
        "scope": SCOPE,
    }
    arm = encode_segment(learner.arm.name, field="arm")
    name = f"initial-output-{arm}-{record['output_sha256'][:12]}.json"
    values = {"logprobs": [[float(value) for value in output] for output in outputs]}
    ctx.run.write_file(name, canonical_bytes(record | values) + b"\n")
    ctx.run.append("initial_output", evidence=name, **record)


def batch_sha256(batch: Sequence[TrainedSequence]) -> str:
    """Digest of token ids, targets and masks of a batch."""
    return digest(
        [
            {
                "tokens": sequence.tokens.tolist(),
                "targets": sequence.targets.tolist(),
                "mask": sequence.loss_mask.tolist(),
            }
            for sequence in batch
        ]
    )


def output_sha256(outputs: Sequence[NDArray[np.float32]]) -> str:
    """Digest of all values at full precision: little-endian float32, one datum after the other."""
    found = hashlib.sha256()
    for output in outputs:
        found.update(np.ascontiguousarray(output, dtype="<f4").tobytes())
    return found.hexdigest()


def digest_of_file(ctx: RunContext, path: str) -> str:
    """SHA-256 of a kept file."""
    return hashlib.sha256(ctx.run.read_bytes(path)).hexdigest()
