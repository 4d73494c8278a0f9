"""Reads golden files: which cases there are, and their numbers."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FOLDER_VARIABLE = "GATED_RL_LOSS_FIXTURES"
OWN_FOLDER = Path(__file__).parents[1] / "fixtures"
NONFINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


@dataclass(frozen=True)
class Block:
    """One case at one precision."""

    file: str
    name: str
    params: dict[str, Any]
    inputs: dict[str, Any]
    dtype: str
    expected: dict[str, Any]
    other: dict[str, Any] | None
    """The outputs at the other precision, where the file has them."""

    @property
    def id(self) -> str:
        return f"{self.file}-{self.name}-{self.dtype}"


def folder() -> Path:
    return Path(os.environ.get(FOLDER_VARIABLE) or OWN_FOLDER)


def decoded(value: Any) -> Any:
    """Turn the strings that stand for non-finite numbers into numbers, at any depth."""
    if isinstance(value, list):
        return [decoded(entry) for entry in value]
    return NONFINITE.get(value, value) if isinstance(value, str) else value


def load(path: Path) -> list[Block]:
    document = json.loads(path.read_text(encoding="utf-8"))
    if set(document) != {"meta", "cases"} or not document["cases"]:
        raise AssertionError(f"{path.name}: expected meta and at least one case")
    blocks = []
    for case in document["cases"]:
        if set(case) != {"name", "params", "inputs", "outputs"} or not case["outputs"]:
            raise AssertionError(f"{path.name}: {case.get('name')}: not a golden case")
        outputs = case["outputs"]
        for dtype, expected in outputs.items():
            if dtype not in ("float64", "float32"):
                raise AssertionError(f"{path.name}: {case['name']}: unknown precision {dtype}")
            other = outputs.get("float32" if dtype == "float64" else "float64")
            blocks.append(
                Block(
                    path.stem,
                    case["name"],
                    case["params"],
                    case["inputs"],
                    dtype,
                    expected,
                    other,
                )
            )
    return blocks


def all_blocks() -> list[Block]:
    paths = sorted(folder().glob("*.json"))
    if not paths:
        raise AssertionError(f"{folder()}: no golden files")
    return [block for path in paths for block in load(path)]


def numbers(value: Any) -> np.ndarray:
    return np.asarray(decoded(value), dtype=np.float64)
