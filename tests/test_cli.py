"""The command line: every bad input is one line and exit code 2; signals and broken runs have their own codes. As
a user would call it."""

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from helpers.cli import main, parse
from helpers.config import preset
from helpers.errors import InputError

FAST = ["--image-size", "32", "--no-tensorboard", "--device", "cpu", "--precision", "fp32"]


def run(*arguments, cwd, env, **options):
    command = [sys.executable, "-m", "helpers.train", *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, **options
    )


def one_line(done, code):
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
    return done.stderr


def test_flags_change_their_preset_and_leave_the_rest(digits):
    config = parse(
        [
            "--preset",
            "naive",
            "--data",
            str(digits),
            "--batch-size",
            "7",
            "--lr",
            "0.5",
            "--cache",
            "--max-steps",
            "3",
        ]
    )
    assert config == preset("naive", data=str(digits), batch_size=7, lr=0.5, cache=True, max_steps=3)
    assert parse([]) == preset("tuned") and parse(["--no-cache"]) == preset("tuned", cache=False)
    assert parse(["--preset=seed", "--device=cpu"]) == preset("seed", device="cpu")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--batch-size", "0"], "at least 1"),
        (["--batch-size", "many"], "batch-size"),
        (["--batch-size"], "batch-size"),
        (["--epochs", "-1"], "at least 1"),
        (["--preset", "fast"], "naive, seed, tuned"),
        (["--precision", "int8"], "fp32"),
        (["--no-such-flag", "1"], "no-such-flag"),
        (["--presett", "naive"], "Unrecognized options: --presett, naive; see --help"),
        (["loose"], "loose"),
        (["--lr", "nan"], "above 0"),
        (["--target-accuracy", "90"], "0.9"),
        (["--data", "nowhere"], "no such folder"),
        (["--device", "cuda:77"], "--device cpu"),
        (["--device", "toaster"], "auto, cpu, cuda"),
        (["--model", "resnet"], "resnet18"),
        (["--resume", "nowhere"], "checkpoints/last.pt"),
        (["--workers", "-5"], "workers"),
        (["--accumulate", "0"], "at least 1"),
        (["--max-steps", "1e3"], "max-steps"),
        (["--image-size", "8", "--shift", "1", "--no-cache"], "--image-size"),
        (["--model", "vit_b_16", "--no-cache"], "--image-size"),
        (["--model", "googlenet", "--image-size", "64", "--no-cache"], "one score"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, hint, capsys, tmp_path, monkeypatch, digits):
    monkeypatch.chdir(tmp_path)
    if "--data" not in arguments:
        arguments = [*arguments, "--data", str(digits)]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.strip().splitlines()) == 1 and hint in err
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").iterdir()), (
        "a refused run leaves no folder behind"
    )


@pytest.mark.parametrize("arguments", [["--presett", "naive"], ["--batch-size", "many"], ["--lr"]])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_wrong_flag_is_one_clean_line_in_any_terminal(arguments, encoding, child_environment, tmp_path):
    done = run(*arguments, cwd=tmp_path, env={**child_environment, "PYTHONIOENCODING": encoding})
    error = one_line(done, 2)
    assert arguments[0] in error and not set("│╭─") & set(error) and "---" not in error and len(error) < 200


def test_help_can_be_read_by_half(child_environment, tmp_path):
    command = f"{sys.executable} -m helpers.train --help | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=child_environment, capture_output=True, text=True)
    assert done.stdout.startswith("usage") and done.stderr == "" and done.returncode in (0, 128 + signal.SIGPIPE)


@pytest.mark.parametrize("kind", ["empty", "single class", "flat", "file"])
def test_a_folder_that_cannot_train_is_one_line(kind, capsys, tmp_path, digits):
    folder = tmp_path / "mine"
    image = next(digits.glob("train/0/*.jpg"))
    if kind == "file":
        folder = image
    else:
        folder.mkdir()
    if kind == "single class":
        (folder / "cats").mkdir()
        shutil.copy(image, folder / "cats")
    if kind == "flat":
        shutil.copy(image, folder)
    assert main(["--data", str(folder), *FAST, "--run-dir", str(tmp_path / "run")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_a_broken_or_foreign_checkpoint_is_one_line(content, capsys, tmp_path):
    path = tmp_path / "model.pt"
    if content is None:
        torch.save({"state_dict": {}}, path)
    else:
        path.write_bytes(content)
    assert main(["--resume", str(path)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_real_call_trains_refuses_its_folder_and_resumes(tmp_path, digits, child_environment):
    arguments = [
        "--preset",
        "tuned",
        "--data",
        digits,
        *FAST,
        "--epochs",
        2,
        "--batch-size",
        16,
        "--run-dir",
        "run",
    ]
    done = run(*arguments, "--max-steps", 3, cwd=tmp_path, env=child_environment)
    assert (
        done.returncode == 0
        and "Traceback" not in done.stderr
        and re.search(r"^3 steps in .*run folder run$", done.stdout, re.M)
    )
    assert "already in use" in one_line(run(*arguments, cwd=tmp_path, env=child_environment), 2)
    done = run("--resume", "run", cwd=tmp_path, env=child_environment)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 16
    error = one_line(run("--resume", "run", "--epochs", 4, cwd=tmp_path, env=child_environment), 2)
    assert "--epochs 2 → 4" in error and "--reschedule" in error
    done = run("--resume", "run", "--epochs", 4, "--reschedule", cwd=tmp_path, env=child_environment)
    assert done.returncode == 0 and json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 32


def test_resume_takes_its_settings_from_the_run(tmp_path, digits):
    main(
        [
            "--preset",
            "naive",
            "--data",
            str(digits),
            *FAST,
            "--no-progress",
            "--max-steps",
            "1",
            "--run-dir",
            str(tmp_path / "run"),
        ]
    )
    config = parse(["--resume", str(tmp_path / "run"), "--max-steps", "9"])
    assert (config.preset, config.data, config.image_size, config.max_steps, config.run_dir) == (
        "naive",
        str(digits),
        32,
        9,
        None,
    )
    assert parse(["--resume", str(tmp_path / "run")]).max_steps is None
    with pytest.raises(InputError, match="--preset naive, not tuned"):
        parse(["--preset", "tuned", "--resume", str(tmp_path / "run")])


@pytest.mark.parametrize(("error", "hint"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"), "--accumulate"),
    (OSError(28, "No space left on device", "run/metrics.jsonl"), "No space left"),
])  # fmt: skip
def test_a_full_gpu_or_disk_is_one_line(error, hint, monkeypatch, capsys):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr("helpers.train.Trainer.fit", fails)
    monkeypatch.setattr("helpers.train.Trainer.__init__", lambda self, config: None)
    assert main([]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == "" and len(err.strip().splitlines()) == 1 and hint in err


def test_a_loss_that_blows_up_is_one_line_and_exit_code_1(tmp_path, digits, capsys):
    flags = [
        "--preset",
        "naive",
        "--data",
        str(digits),
        *FAST,
        "--no-progress",
        "--lr",
        "1e30",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    assert main(flags) == 1
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1 and "epoch" in error and "last.pt" in error


def test_fp16_on_a_cpu_runs_and_says_that_it_is_slow(tmp_path, digits, capsys):
    flags = [*FAST[:-2], "--precision", "fp16", "--max-steps", "1", "--run-dir", str(tmp_path / "run")]
    assert main(["--preset", "naive", "--data", str(digits), *flags]) == 0
    assert "slow" in capsys.readouterr().out


def workers_of(trainer):
    """Processes started by the trainer, directly or through a fork server."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if fields[0] != "Z" and int(fields[2]) == trainer:  # its process group
            found.append(int(entry.parent.name))
    return [pid for pid in found if pid != trainer]


def endless(digits, method, *flags):
    """Arguments of a training with two workers that goes on until somebody ends it."""
    loader = ["--no-cache", "--workers", "2", "--start-method", method, "--batch-size", "16"]
    return [*loader, "--data", str(digits), *FAST, "--epochs", "2000", "--log-every", "1", "--run-dir", "run", *flags]


def interrupted(tmp_path, digits, env, number, method="default", *flags):
    """Start training with workers in a process group of its own, on a terminal, and signal the group once steps
    are logged."""
    arguments = endless(digits, method, *flags)
    leader, follower = pty.openpty()
    trainer = subprocess.Popen(
        [sys.executable, "-m", "helpers.train", *arguments],
        cwd=tmp_path, env=env, stdin=follower, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    log = tmp_path / "run/metrics.jsonl"
    deadline = time.monotonic() + 90
    while (
        not (log.exists() and log.read_text().count("\n") >= 5)
        and trainer.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert trainer.poll() is None, trainer.communicate()[1]
    os.killpg(trainer.pid, number)
    _, err = trainer.communicate(timeout=60)
    os.close(leader), os.close(follower)
    return trainer, err


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_ctrl_c_ends_with_130_one_line_a_checkpoint_and_no_worker(tmp_path, digits, child_environment, method):
    trainer, err = interrupted(tmp_path, digits, child_environment, signal.SIGINT, method)
    assert trainer.returncode == 130 and len(err.strip().splitlines()) == 1 and "--resume run" in err, err
    deadline = time.monotonic() + 10
    while workers_of(trainer.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not workers_of(trainer.pid)
    done = run(
        "--resume",
        "run",
        "--max-steps",
        2000,
        "--epochs",
        2000,
        "--no-progress",
        "--target-accuracy",
        0.01,
        cwd=tmp_path,
        env=child_environment,
    )
    assert done.returncode == 0, done.stderr


def test_a_ctrl_c_that_a_library_swallowed_is_not_forgotten(digits, tmp_path, monkeypatch, capsys):
    import helpers.processes
    import helpers.run

    def swallow(*arguments):
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        return built(*arguments)

    built, before = helpers.run.build_optimizer, signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(helpers.run, "build_optimizer", swallow)
    try:
        flags = ["--data", str(digits), *FAST, "--no-progress", "--run-dir", str(tmp_path / "run")]
        assert main(flags) == 130
    finally:
        signal.signal(signal.SIGINT, before)
        helpers.processes._interrupted = False
    assert "before training began" in capsys.readouterr().err


@pytest.mark.parametrize("delay", [0.2, 0.5, 0.9, 1.4])
def test_ctrl_c_before_training_is_one_line(delay, digits, child_environment, tmp_path):
    command = [
        sys.executable,
        "-m",
        "helpers.train",
        "--data",
        str(digits),
        *FAST,
        "--epochs",
        "5000",
        "--run-dir",
        "run",
    ]
    trainer = subprocess.Popen(
        command, cwd=tmp_path, env=child_environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    while b"torch" not in Path(f"/proc/{trainer.pid}/maps").read_bytes():  # Python itself has started
        time.sleep(0.01)
    time.sleep(delay)
    os.killpg(trainer.pid, signal.SIGINT)
    _, err = trainer.communicate(timeout=60)
    assert trainer.returncode == 130 and len(err.strip().splitlines()) == 1, err


def test_sigterm_ends_with_143_and_a_checkpoint(tmp_path, digits, child_environment):
    trainer, err = interrupted(tmp_path, digits, child_environment, signal.SIGTERM)
    assert (
        trainer.returncode == 143
        and len(err.strip().splitlines()) == 1
        and (tmp_path / "run/checkpoints/last.pt").exists()
    )


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_killed_trainer_leaves_a_checkpoint_and_no_worker(tmp_path, digits, child_environment, method):
    arguments = endless(digits, method, "--checkpoint-every", "1")
    process = subprocess.Popen(
        [sys.executable, "-m", "helpers.train", *arguments, "--no-progress"],
        cwd=tmp_path, env=child_environment, start_new_session=True,
    )  # fmt: skip
    log = tmp_path / "run/metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (log.exists() and log.read_text().count("\n") >= 5) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(workers_of(process.pid)) >= 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while workers_of(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = workers_of(process.pid)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
    done = run("--resume", "run", "--no-progress", "--target-accuracy", 0.01, cwd=tmp_path, env=child_environment)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_touches_no_device_process_or_file(child_environment, tmp_path):
    code = (
        "import sys, threading, multiprocessing, helpers\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "before = set(sys.modules)\n"
        "import helpers.train\n"
        "heavy = {'torchvision', 'tensorboard', 'tyro', 'tqdm', 'matplotlib', 'torchcodec'} & "
        "set(sys.modules) - before\n"
        "assert not heavy, heavy\n"
        "assert not torch.cuda.is_initialized() and threading.active_count() == 1 and not "
        "multiprocessing.active_children()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=child_environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
