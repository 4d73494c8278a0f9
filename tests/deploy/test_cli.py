"""The command line: one line and the right exit status for everything that can be wrong."""

import json
import socket
from pathlib import Path

import pytest

from deploy.cli import main
from evidence.evaluator import evaluator_id
from tests.evidence import finished_run

SPECS = Path(__file__).resolve().parents[2] / "flows" / "specs"
SEEDS = Path(__file__).resolve().parents[1] / "evidence" / "seeds"


def changed(tmp_path, change, *, name="arithmetic"):
    """A copy of a shipped spec with one change, and an execution file that belongs to it."""
    spec = json.loads((SPECS / f"{name}.json").read_text())
    change(spec)
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(spec))
    return path


def one_line(capsys):
    """The single line on standard error."""
    lines = capsys.readouterr().err.splitlines()
    said = [line for line in lines if line.startswith("gated-rl:")]
    assert len(said) == 1, lines
    assert not any("Traceback" in line for line in lines)
    return said[0]


def test_check_tells_what_a_launchable_spec_means(capsys):
    """A shipped spec can be launched; the half width at 40 items is 2 sqrt(ln 40 / 80) = 0.429."""
    assert main(["check", "arithmetic"]) == 0

    out = capsys.readouterr().out
    assert "40 units give a half width of 0.429" in out
    assert out.rstrip().endswith("This spec can be launched.")


def test_check_prints_one_json_object(capsys):
    """A program gets the same findings as one JSON object."""
    assert main(["check", "arithmetic", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["launchable"] is True
    assert found["plan"]["criteria"][0]["half_width"] == pytest.approx(0.42946940, abs=1e-8)


def test_check_names_the_spec_that_resolves_an_original(capsys):
    """An original with placeholders is not launchable; the resolved spec is named."""
    assert main(["check", str(SEEDS / "dppo_spec.json")]) == 2

    assert "launch 'gsm8k-dppo', which resolves it" in capsys.readouterr().out


def test_check_says_that_a_rule_cannot_fire(capsys):
    """From a base score of 0.958 no effect can exceed 0.042, and 0.412 would be needed."""
    main(["check", "retail-sdpo", "--base-score", "0.958"])

    out = capsys.readouterr().out
    assert "The rule cannot fire" in out
    assert "an effect above 0.412 is needed" in out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop("hypothesis"), "hypothesis: expected a value"),
        (
            lambda s: s["decision_rule"]["criteria"][0].update(margin=float("nan")),
            "decision_rule.criteria[0].margin: expected a finite number, found nan",
        ),
        (lambda s: s["arms"][0].update(name="dppo"), "arms[1].name: expected a name no other arm"),
        (
            lambda s: s["arms"][0].update(lr=[1e-4, 2e-4]),
            "arms[0].lr: expected one learning rate (a grid of learning rates is not supported yet)",
        ),
        (
            lambda s: s["budget"].update(max_wall_minutes=0),
            "budget.max_wall_minutes: expected a number above 0",
        ),
        (lambda s: s["decision_rule"].update(seeds=[2**63]), "decision_rule.seeds[0]: expected"),
    ],
    ids=["missing field", "NaN margin", "equal arms", "rate grid", "zero budget", "huge seed"],
)
def test_a_bad_spec_is_one_line_and_exit_status_two(tmp_path, capsys, change, said):
    """The line names the file, the field, what was expected and what was found."""
    path = changed(tmp_path, change)

    assert main(["check", str(path)]) == 2
    line = one_line(capsys)
    assert str(path) in line
    assert said in line


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{bad", "expected valid JSON"),
        (b'{"a": 1, "a": 2}', "no key twice"),
        (b"[" * 100_000, "levels"),
        (b"\xff\xfe", "UTF-8"),
        (b'{"a": 1' + b"0" * 500 + b"}", "number literal"),
        (b"[]", "object"),
    ],
    ids=["not JSON", "duplicate key", "deep", "not UTF-8", "long number", "list"],
)
def test_a_file_that_is_no_spec_is_one_line_and_exit_status_two(tmp_path, capsys, data, said):
    """Whatever the bytes are, the answer is one line that names the file."""
    path = tmp_path / "spec.json"
    path.write_bytes(data)

    assert main(["check", str(path)]) == 2
    assert said in one_line(capsys)


def test_an_unknown_loss_is_refused_by_name(tmp_path, capsys):
    """The execution file's loss kind is checked before anything is started."""
    execution = json.loads((SPECS / "arithmetic.execution.json").read_text())
    execution["arms"]["dppo"]["loss"]["kind"] = "magic"
    path = tmp_path / "execution.json"
    path.write_text(json.dumps(execution))

    assert main(["check", "arithmetic", "--execution", str(path)]) == 2
    line = one_line(capsys)
    assert "loss" in line
    assert "magic" in line


def test_an_execution_file_of_another_spec_is_a_contradiction(tmp_path, capsys):
    """A changed spec has another digest than its execution file names."""
    path = changed(tmp_path, lambda spec: spec.update(title="another title"))
    execution = SPECS / "arithmetic.execution.json"

    assert main(["check", str(path), "--execution", str(execution)]) == 2
    assert "spec_sha256" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--run-id", "../x"], "--run-id: expected"),
        (["--limit", "0"], "--limit: expected at least 1"),
        (["--accept-unverified", "nothing"], "--accept-unverified: expected one of"),
        (["--profile", "nothing"], "--profile: expected"),
        (["--service", "not a url"], "--service: expected"),
        (["--service", "http://[x"], "--service: expected"),
        (["--service", "http://h:abc"], "--service: expected"),
    ],
)
def test_run_refuses_a_wrong_option_before_it_starts_anything(tmp_path, capsys, options, said):
    """No service is started and no run directory is made for a wrong option."""
    assert main(["run", "tiny", "--run-dir", str(tmp_path / "runs"), *options]) == 2
    assert said in one_line(capsys)
    assert not (tmp_path / "runs").exists()


def test_run_names_the_resolved_spec_of_an_original(tmp_path, capsys):
    """An original spec is refused at launch, with the name of the spec derived from it."""
    assert main(["run", str(SEEDS / "dppo_spec.json"), "--run-dir", str(tmp_path)]) == 2
    assert "'gsm8k-dppo'" in one_line(capsys)


@pytest.mark.slow
def test_run_says_within_half_a_minute_that_no_service_is_there(tmp_path, capsys):
    """A port on which nothing listens is known long before the SDK's five minutes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"

    status = main(["run", "tiny", "--service", url, "--run-dir", str(tmp_path), "--no-prefect"])

    assert status == 30
    assert url in one_line(capsys)


FOREIGN_SPEC = {
    "arms": [{"name": "grpo"}, {"name": "sdpo"}],
    "decision_rule": finished_run.spec()["decision_rule"],
}


def foreign_record():
    """60 items, all solved by sdpo and none by grpo; nothing says which is the treatment."""
    items = [f"i{number}" for number in range(60)]
    provenance = {
        "code_sha256": "c" * 64,
        "prompt_template": "t",
        "decoding": {"temperature": 0},
        "parser": "p",
        "items": {"ids": items},
    }
    evaluator = evaluator_id(provenance)
    shared = {"seed": 0, "metric": "accuracy", "evaluator_id": evaluator}
    arms = {"grpo": 0, "sdpo": 1}
    rows = [
        {**shared, "item_id": item, "arm": arm, "value": value}
        for arm, value in arms.items()
        for item in items
    ]
    scores = [{**shared, "arm": arm, "value": value} for arm, value in arms.items()]
    return {
        "decision": {"version": 1, "observations": rows},
        "evaluation": {
            "version": 1,
            "evaluators": {evaluator: provenance},
            "scores": scores,
            "comparisons": [],
        },
    }


def test_audit_reproduces_the_real_record(capsys):
    """The printed object holds every validation of the record, exactly."""
    spec, record = SEEDS / "sdpo_triage.json", SEEDS / "sdpo_run.json"

    assert main(["audit", str(spec), str(record), "--json"]) == 0

    answers = json.loads(capsys.readouterr().out)
    fields = json.loads(record.read_text())["fields"]
    for name in (
        "correctness_validation",
        "decision_validation",
        "evaluator_validation",
        "feasibility",
        "generation_audit_validation",
        "restoration_validation",
    ):
        assert json.dumps(answers[name]) == json.dumps(fields[name])


def test_audit_says_by_which_rule_it_mapped_roles(tmp_path, capsys):
    """A record that names no roles is judged by the order of the arms, and that is printed."""
    spec, record = tmp_path / "spec.json", tmp_path / "record.json"
    spec.write_text(json.dumps(FOREIGN_SPEC))
    record.write_text(json.dumps(foreign_record()))

    assert main(["audit", str(spec), str(record)]) == 0

    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("decision_validation")]
    assert line.split()[1] == "supported"
    assert line.endswith("By the order of the spec's arms, baseline is grpo and treatment is sdpo.")


@pytest.mark.parametrize("command", ["verify", "report", "status"])
def test_a_run_that_is_not_there_is_one_line(tmp_path, capsys, command):
    """Commands on runs and bundles name what they did not find."""
    assert main([command, str(tmp_path / "nothing")]) == 2
    assert "nothing" in one_line(capsys)


def test_help_exists_for_every_command(capsys):
    """`--help` of every command exits 0 and describes it."""
    for command in ("check", "run", "status", "report", "verify", "audit", "serve-local"):
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0
        assert f"gated-rl {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ({"url": "http://127.0.0.1:1", "header_env": []}, "header_env"),
        ({"url": "http://127.0.0.1:1", "deadlines": {"reach": "x"}}, "deadlines.reach"),
        ({"url": "http://127.0.0.1:1", "password": "x"}, "password"),
    ],
)
def test_a_wrong_service_profile_is_one_line(tmp_path, capsys, profile, said):
    """Every field of a service profile is checked before a request is made."""
    path = tmp_path / "service.json"
    path.write_text(json.dumps(profile))
    runs = str(tmp_path / "runs")

    assert main(["run", "tiny", "--service-profile", str(path), "--run-dir", runs]) == 2
    assert said in one_line(capsys)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s["decision_rule"].update(seeds=[0, 1]), "decision_rule.seeds: expected one"),
        (lambda s: s["arms"][0].update(seed=7), "arms[0].seed: expected the scheduled 0"),
        (lambda s: s["arms"][0].update(name="clip 0.2/0.28"), "arms[0].name: expected letters"),
        (lambda s: s["arms"][0].update(name="base"), "arms[0].name: expected another name"),
        (lambda s: s["arms"][0].update(name="DPPO"), "more than case"),
    ],
    ids=["two seeds", "unscheduled seed", "no file name", "called base", "case twins"],
)
def test_run_refuses_a_spec_that_it_could_not_carry_to_the_end(tmp_path, capsys, change, said):
    """What would only fail after all training is refused before anything is started."""
    spec = json.loads((SPECS / "tiny.json").read_text())
    old = spec["arms"][0]["name"]
    change(spec)
    new = spec["arms"][0]["name"]
    execution = json.loads((SPECS / "tiny.execution.json").read_text())
    execution["arms"] = {new if k == old else k: v for k, v in execution["arms"].items()}
    (tmp_path / "s.json").write_text(json.dumps(spec))
    (tmp_path / "s.execution.json").write_text(json.dumps(execution))

    assert main(["run", str(tmp_path / "s.json"), "--run-dir", str(tmp_path / "runs")]) == 2
    assert said in one_line(capsys)


def test_check_looks_at_the_spec_as_a_profile_scales_it(capsys):
    """The laptop profile trains another, smaller model than the GSM8K experiment registers."""
    main(["check", "gsm8k-dppo", "--profile", "laptop"])

    out = capsys.readouterr().out
    assert "SmolLM2-135M-Instruct" in out
    assert "Qwen/Qwen3.5-2B, LoRA" not in out
