"""Find a spec, its execution file and a profile by name or by path.

Shipped files stand in ``flows/specs``: ``<name>.json`` beside ``<name>.execution.json``, and
profiles in ``flows/specs/profiles/<name>.json``. A user's own spec is given as a path; its
execution file is the file beside it with the same stem.
"""

from dataclasses import dataclass
from pathlib import Path

from evidence.errors import InputError
from evidence.spec import Spec

SPECS_DIR = Path(__file__).resolve().parent / "specs"
EXECUTION_SUFFIX = ".execution.json"
DIAGNOSTIC_SUFFIX = ".diagnostic.json"


@dataclass(frozen=True, slots=True)
class SpecFiles:
    """Where one experiment is written down.

    Attributes:
        name: stem of the spec file.
        spec: the spec file.
        execution: the execution file beside it, or None where there is none.
    """

    name: str
    spec: Path
    execution: Path | None


def shipped_specs() -> list[str]:
    """Names of the specs that ship with the program, sorted."""
    return sorted(
        path.stem
        for path in SPECS_DIR.glob("*.json")
        if not path.name.endswith((EXECUTION_SUFFIX, DIAGNOSTIC_SUFFIX))
    )


def shipped_profiles() -> list[str]:
    """Names of the profiles that ship with the program, sorted."""
    return sorted(path.stem for path in (SPECS_DIR / "profiles").glob("*.json"))


def find_spec(name_or_path: str) -> SpecFiles:
    """Resolve a shipped name or a path to its spec and execution file.

    Raises:
        InputError: if neither a shipped spec nor a readable file has that name.
    """
    if name_or_path in shipped_specs():
        return _beside(SPECS_DIR / f"{name_or_path}.json")
    path = Path(name_or_path)
    if path.is_file():
        return _beside(path)
    raise InputError(
        field="SPEC",
        value=name_or_path,
        expected=f"a file, or one of the shipped specs: {', '.join(shipped_specs()) or 'none'}",
    )


def find_diagnostic(spec: SpecFiles, settings: str | None) -> Path:
    """Resolve the settings file of a diagnostic: a path, or the file beside the spec.

    Raises:
        InputError: if there is no such file.
    """
    beside = spec.spec.with_name(spec.name + DIAGNOSTIC_SUFFIX)
    path = beside if settings is None else Path(settings)
    if path.is_file():
        return path
    raise InputError("--settings", str(path), "a settings file of a diagnostic")


def find_profile(name_or_path: str) -> Path:
    """Resolve a shipped profile's name or a path.

    Raises:
        InputError: if neither a shipped profile nor a readable file has that name.
    """
    if name_or_path in shipped_profiles():
        return SPECS_DIR / "profiles" / f"{name_or_path}.json"
    path = Path(name_or_path)
    if path.is_file():
        return path
    raise InputError(
        field="--profile",
        value=name_or_path,
        expected=f"a file, or one of the shipped profiles: {', '.join(shipped_profiles()) or 'none'}",
    )


def resolved_from(spec: Spec) -> str | None:
    """Name of the shipped spec that resolves this one, if there is one."""
    for name in shipped_specs():
        shipped = find_spec(name).spec
        if Spec.parse(shipped.read_bytes(), where=str(shipped)).derived_from == spec.digest:
            return name
    return None


def _beside(spec: Path) -> SpecFiles:
    execution = spec.with_name(spec.name.removesuffix(".json") + EXECUTION_SUFFIX)
    return SpecFiles(
        name=spec.stem, spec=spec, execution=execution if execution.is_file() else None
    )
