"""GSM8K's rows, from a local folder of JSONL files or from the hub, with a digest of each split."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_cookbook.recipes.math_rl.math_env import extract_gsm8k_final_answer

from envs.errors import EnvInputError

FOLDER_VARIABLE = "GATED_RL_GSM8K"
HUB_NAME = "openai/gsm8k"
SPLITS = ("train", "test")


@dataclass(frozen=True, slots=True)
class Problem:
    """One row: the question as asked, the reference answer, and the worked solution's text."""

    question: str
    reference: str
    solution: str


@dataclass(frozen=True, slots=True)
class Gsm8kData:
    """Both splits in their published order.

    `digests` maps a split to the SHA-256 of its rows: for each row the JSON array
    [question, answer] (non-ASCII escaped, `", "` between), followed by a newline. It does not
    depend on the file format the rows came from.
    """

    train: tuple[Problem, ...]
    test: tuple[Problem, ...]
    digests: Mapping[str, str]
    source: str


def load_gsm8k(folder: Path | None = None, *, revision: str | None = None) -> Gsm8kData:
    """Read GSM8K's main configuration.

    Args:
        folder: holds `train.jsonl` and `test.jsonl`. Where None, the folder that the environment
            variable `GATED_RL_GSM8K` names, and without that the hub's `openai/gsm8k`.
        revision: commit of the hub's data set; ignored for a folder.

    Raises:
        EnvInputError: if a file is missing or a row cannot be read.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    local = folder or (Path(named) if named else None)
    if local is not None:
        rows = {split: _read_jsonl(local / f"{split}.jsonl") for split in SPLITS}
        source = "local folder"
    else:
        rows = _read_hub(revision)
        source = f"{HUB_NAME} main" + (f" at {revision}" if revision else "")
    splits = {
        split: tuple(_problem(row, f"{split} row {n}") for n, row in enumerate(rows[split]))
        for split in SPLITS
    }
    digests = {split: _rows_sha256(rows[split]) for split in SPLITS}
    return Gsm8kData(train=splits["train"], test=splits["test"], digests=digests, source=source)


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file."""
    if not path.is_file():
        raise EnvInputError(FOLDER_VARIABLE, str(path), "an existing file of GSM8K rows")
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise EnvInputError(
                    f"line {number}", line.strip(), "a JSON object", where=str(path)
                ) from error
    return rows


def _read_hub(revision: str | None) -> dict[str, list[dict[str, Any]]]:
    """Rows of the hub's data set."""
    # Importing `datasets` takes over a second, and a local folder does without it.
    from datasets import load_dataset  # noqa: PLC0415

    try:
        return {
            split: load_dataset(HUB_NAME, "main", split=split, revision=revision).to_list()
            for split in SPLITS
        }
    except (OSError, ValueError) as error:
        raise EnvInputError(
            "GSM8K",
            HUB_NAME,
            f"a data set the hub can send, or a folder named by {FOLDER_VARIABLE} ({error})",
        ) from error


def _problem(row: Any, where: str) -> Problem:
    """Check one row and read its reference answer with the cookbook's rule."""
    if not isinstance(row, dict) or not all(
        isinstance(row.get(key), str) and row[key] for key in ("question", "answer")
    ):
        raise EnvInputError(where, row, "an object with the texts question and answer")
    try:
        reference = extract_gsm8k_final_answer(row["answer"])
    except ValueError as error:
        raise EnvInputError(where, row["answer"], "an answer that ends in ####") from error
    return Problem(question=row["question"], reference=reference, solution=row["answer"])


def _rows_sha256(rows: list[dict[str, Any]]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row["question"], row["answer"]]).encode() + b"\n")
    return digest.hexdigest()
