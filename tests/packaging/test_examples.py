"""The examples, run as a user runs them, on small files of the formats they take."""

import io
import pickle
import re
import tarfile

import keras
import numpy as np
import pytest

from tests.packaging.repository import ROOT, run_python, run_script


def run_example(name: str, *arguments: str) -> str:
    result = run_script("-W", "error::UserWarning", str(ROOT / "examples" / name), *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def number(pattern: str, text: str) -> float:
    match = re.search(pattern, text, re.MULTILINE)
    assert match, f"{pattern!r} not in:\n{text}"
    return float(match.group(1))


def two_kinds_of_images(shape: tuple[int, ...], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Images bright in the upper half, labelled 0, or in the lower half, labelled 1.

    The rows are the last axis but one, as in both formats.
    """
    random = np.random.default_rng(0)
    labels = np.arange(count) % 2
    images = random.integers(0, 50, size=(count, *shape))
    half = shape[-2] // 2
    images[labels == 0, ..., :half, :] += 200
    images[labels == 1, ..., half:, :] += 200
    return images.astype("uint8"), labels


@pytest.fixture
def mnist_file(tmp_path):
    x_train, y_train = two_kinds_of_images((28, 28), 640)
    x_test, y_test = two_kinds_of_images((28, 28), 100)
    path = tmp_path / "mnist.npz"
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return path


def cifar_batches() -> dict[str, bytes]:
    names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    batches = {}
    for name in names:
        images, labels = two_kinds_of_images((3, 32, 32), 64)
        content = {b"data": images.reshape(64, 3072), b"labels": labels.tolist()}
        batches[name] = pickle.dumps(content, protocol=2)
    return batches


@pytest.fixture(params=["folder", "archive"])
def cifar_path(request, tmp_path):
    if request.param == "folder":
        folder = tmp_path / "cifar-10-batches-py"
        folder.mkdir()
        for name, content in cifar_batches().items():
            (folder / name).write_bytes(content)
        return folder
    path = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in cifar_batches().items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_mnist_from_a_file(mnist_file):
    output = run_example(
        "mnist.py",
        *("--data_path", str(mnist_file), "--epochs", "2", "--batch_size", "16"),
        *("--num_workers", "2", "--push_every", "5", "--fetch_every", "5"),
    )
    assert number(r"held-out accuracy ([\d.]+)", output) > 0.9
    assert number(r"mini-batches (\d+)", output) == 2 * 640 / 16


@pytest.mark.slow
def test_cifar10_from_a_folder_or_an_archive(cifar_path):
    output = run_example(
        "cifar10.py",
        *("--data_path", str(cifar_path), "--epochs", "1", "--batch_size", "16"),
        *("--num_workers", "2", "--push_every", "2", "--fetch_every", "2"),
    )
    assert number(r"held-out accuracy ([\d.]+)", output) >= 0.0
    assert number(r"mini-batches (\d+)", output) == 5 * 64 / 16


def test_custom_train_step_finds_the_weights():
    output = run_example("custom_train_step.py", "--epochs", "4")
    assert number(r"largest error ([\d.]+)", output) < 0.05


@pytest.mark.slow
def test_simulated_cluster_repeats():
    output = run_example("simulated_cluster.py", "--workers", "1,4", "--epochs", "1")
    assert "the same run twice gives the same weights: True" in output


@pytest.mark.slow
def test_softsync_makes_an_update_for_every_c_gradients():
    """1,437 images in batches of 4 are 360 mini-batches, here of 6 workers."""
    output = run_example("softsync.py", "--workers", "6", "--n", "2", "--epochs", "1")
    lines = [line.split() for line in output.splitlines()[1:]]
    assert [(int(line[0]), int(line[-2])) for line in lines] == [(2, 120)] * 2
    for line in lines:
        assert 1.5 < float(line[-1]) < 2.2  # about n
        assert float(line[-3].rstrip("%")) < 90.0  # better than by chance


@pytest.mark.slow
def test_strom_learns_with_and_without_a_server():
    """1,437 images in batches of 16 are 90 mini-batches an epoch."""
    output = run_example("strom.py", "--epochs", "6")
    for name in ("Downpour", "peers"):
        line = rf"^{name} +([\d.]+) % +540 +"
        assert number(line, output) > 80.0  # see the comment in the example


@pytest.mark.slow
def test_synthetic_gradients_train_the_lower_part():
    output = run_example("synthetic_gradients.py", "--epochs", "10")
    kinds = ("coupled", "decoupled", "lower part as it began")
    coupled, decoupled, began = (
        number(rf"^{kind}: held-out accuracy ([\d.]+)", output) for kind in kinds
    )
    assert began + 0.01 < decoupled < coupled + 0.02  # 0.922, 0.958 and 0.969 were seen


@pytest.mark.slow
def test_model_parallel_is_the_model_on_one_device():
    """1,437 images in batches of 32 are 45 mini-batches an epoch, the last of 29."""
    output = run_example("model_parallel.py", "--epochs", "4", "--microbatches", "3")
    assert number(r"held-out accuracy ([\d.]+)", output) > 0.7  # 0.89 to 0.92 were seen
    assert number(r"mini-batches (\d+)", output) == 4 * 45
    assert number(r"largest difference ([\d.e+-]+)", output) < 1e-4
    parts = dict(re.findall(r"^(\d) +CPU:\d +([\d,]+)", output, re.MULTILINE))
    lower, upper = 65 * 96 + 97 * 96, 97 * 64 + 65 * 10
    assert parts == {"0": f"{lower:,}", "1": f"{upper:,}"}


@pytest.mark.slow
def test_batch_methods_get_farther_than_adam_in_as_many_passes():
    output = run_example("batch_methods.py", "--iterations", "25")
    ours = number(r"lbfgs: \d+ passes, loss ([\d.]+)", output)
    assert ours < number(r"adam: \d+ passes, loss ([\d.]+)", output)


@pytest.mark.slow
def test_averaging_meets_as_often_as_it_says():
    """1,437 images in batches of 4 are 360 mini-batches: 15 rounds of 4 workers and 6 each."""
    output = run_example("averaging.py", "--workers", "4", "--every", "6", "--epochs", "1")
    rows = [line[27:].split() for line in output.splitlines()[1:]]
    assert [(int(steps), int(updates)) for _, steps, updates in rows[:3]] == [(360, 15)] * 3
    assert int(rows[3][1]) == 360 and 60 <= int(rows[3][2]) <= 64
    for error, _, _ in rows:
        assert float(error.rstrip("%")) < 90.0  # better than by chance


@pytest.mark.alone
def test_spmd_averaging_trains_one_model_in_two_processes():
    output = run_example("spmd_averaging.py", "--epochs", "3", "--average_every", "8")
    one, two = [line for line in output.splitlines() if "process(es)" in line]
    # 1,437 images are 45 mini-batches of 32; half of them 23: averages at 8, 16 and 23.
    assert one.startswith("1 process(es): 135 steps each, 0 averages")
    assert two.startswith("2 process(es): 69 steps each, 9 averages")
    assert number(r"accuracy ([\d.]+)", two) > 0.85


@pytest.mark.slow
@pytest.mark.alone
def test_spark_trains_on_a_dataframe():
    """About half of the rows are within the ball, so 0.65 after 4 epochs is learnt."""
    pytest.importorskip("pyspark", reason='pyspark is not installed: pip install "tf_dsgd[spark]"')
    output = run_example("spark_dataframe.py", "--rows", "20000", "--epochs", "4")
    for name in ("plain fit", "LocalCluster", "Distributor"):
        assert number(rf"{name} +accuracy ([\d.]+)", output) > 0.65


def check_a3c(output: str, rollouts: int) -> None:
    """Looked at twice; a rollout is of at most five steps, an episode of at least eight."""
    assert number(r"^rollouts (\d+)", output) == number(r"updates (\d+)", output) == rollouts
    ended = [int(n) for n in re.findall(r"(\d+) episodes ended.*new ones: +[\d.]+$", output, re.M)]
    assert len(ended) == 2
    assert sum(ended) == number(r"^episodes (\d+)", output) <= rollouts * 5 / 8


@pytest.mark.slow
def test_a3c_learns_on_a_virtual_clock_and_is_saved(tmp_path):
    """By chance an episode has about 22 steps."""
    path = tmp_path / "policy.keras"
    sizes = ("--rollouts", "1000", "--check_every", "500")
    output = run_example(
        "a3c_cartpole.py", "--simulated", "--workers", "2", *sizes, "--save", str(path)
    )
    check_a3c(output, 1000)
    assert number(r" 1000 rollouts: .* mean return of +([\d.]+)", output) > 30.0
    assert keras.saving.load_model(path).count_params() == 4 * 64 + 64 + 64 * 2 + 2 + 64 + 1


@pytest.mark.alone
def test_a3c_runs_on_processes():
    """The same script; each worker's episode is in its own process."""
    script = str(ROOT / "examples" / "a3c_cartpole.py")
    launch = ("-m", "tf_dsgd.launch", "--workers", "2")
    result = run_python(*launch, script, "--rollouts", "240", "--check_every", "120")
    assert result.returncode == 0, result.stderr
    check_a3c(result.stdout, 240)


def check_recommender(output: str) -> None:
    """What is learnt here is learnt by rows, so an AUC near the best says that they are right.

    It is 0.58 with the gradients of the users' table left out, 0.72 with those of every other row
    left out, and 0.53 with each of them given to the next row.
    """
    best = number(r"best possible\s+([\d.]+)", output)
    assert 0.90 < best < 0.94
    assert best - 0.03 < number(r"held-out AUC\s+([\d.]+)", output) < best + 0.01
    assert number(r"before training\s+([\d.]+)", output) == pytest.approx(0.5, abs=0.04)
    assert number(r"users exchanged\s+([\d.]+)", output) == pytest.approx(0.5, abs=0.04)
    assert number(r"recall of the top 10\s+([\d.]+)", output) > 0.6
    assert number(r"mini-batches (\d+)", output) == -(-600_000 // 512)  # each example once


@pytest.mark.slow
def test_recommender_ranks_almost_as_well_as_can_be():
    check_recommender(run_example("recommender.py"))


@pytest.mark.alone
def test_recommender_does_so_on_two_ps_and_ends():
    """The tables split over two processes; everything that was started ends with the script."""
    script = str(ROOT / "examples" / "recommender.py")
    launch = ("-m", "tf_dsgd.launch", "--workers", "2", "--ps", "2")
    result = run_python("-W", "error::UserWarning", *launch, script)
    assert result.returncode == 0, result.stderr
    check_recommender(result.stdout)
    assert re.search(r"ps 1 at \S+ holds \d+ variables, 128", result.stdout + result.stderr)


@pytest.mark.slow
def test_quickstart_reaches_the_promised_accuracy():
    output = run_example("quickstart.py")
    assert number(r"held-out accuracy\s+([\d.]+)", output) >= 0.96
    assert number(r"staleness\s+mean ([\d.]+)", output) > 0
    # 1,437 images in batches of 32 are 45 mini-batches an epoch.
    assert number(r"(\d+) mini-batches of 32", output) == 30 * 45
