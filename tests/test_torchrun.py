"""Jobs as they are started on one machine or two: they train together, say once what is wrong, and end together."""

import contextlib
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import start
from test_trainers import flags_of
from torch.distributed.run import main as torchrun

import train_sft
from minirl.checkpoint import latest_checkpoint
from minirl.metrics import read_metrics
from minirl.parallel.guard import GRACE
from minirl.parallel.mesh import LOST

pytestmark = [pytest.mark.dist, pytest.mark.skipif(sys.platform != "linux", reason="/proc shows who is whose child")]
REPO = Path(__file__).resolve().parents[1]
TIMEOUT = 10  # seconds: on a busy machine one rank may have started so much later than the other
SLACK = 25  # seconds for a busy machine


def parent(pid: str) -> int:
    """0 for a process that is no more, or has ended and waits to be noticed."""
    try:
        state, number = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return 0
    return 0 if state == "Z" else int(number)


def family(pid: int) -> list[int]:
    """A process, its children, and theirs: torchrun, the rank, and the rank's guard."""
    children = [int(path.name) for path in Path("/proc").glob("[0-9]*") if parent(path.name) == pid]
    return [pid, *(descendant for child in children for descendant in family(child))]


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if parent(str(pid))]


def wait_until(condition, seconds: float) -> bool:
    """Seconds count while this process is awake: what freezes it, as a laptop's lid does, freezes the job as well."""
    waited = 0.0
    while not condition() and waited < seconds:
        began = time.monotonic()
        time.sleep(0.05)
        waited += min(time.monotonic() - began, 1.0)
    return condition()


def for_a_start() -> float:
    """Seconds, more of them on a busy machine: a job of two ranks imports torch four times."""
    return 60 * max(1.0, os.getloadavg()[0] / os.cpu_count())


def free_port() -> int:
    """A port that is free and stays so: from below those that the system gives to whoever asks for any."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", random.SystemRandom().randrange(1024, lowest)))
            return probe.getsockname()[1]


class Job:
    """A torchrun on each of some machines, which are all this one. Nothing of it outlives the `with`."""

    def __init__(self, folder: Path, *command: str, machines: int = 1, ranks: int = 1):
        self.texts = [folder / f"machine_{number}.txt" for number in range(machines)]
        port = free_port()
        self.agents = [
            start(torchrun, ["--nnodes", str(machines), "--node_rank", str(number), "--master_addr", "localhost",
                             "--master_port", str(port), "--nproc_per_node", str(ranks), *command],
                  environment={"PYTHONPATH": str(REPO)}, output=text) for number, text in enumerate(self.texts)]
        self.seen: set[int] = set()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        for pid in alive([*self.look()]):
            os.kill(pid, signal.SIGKILL)
        for agent in self.agents:
            agent.join()

    def look(self) -> set[int]:
        """Whoever belongs to the job, or did."""
        self.seen |= {pid for agent in self.agents for pid in family(agent.pid)}
        return self.seen

    def rank(self, machine: int) -> int:
        """The process of a machine's first rank."""
        return family(self.agents[machine].pid)[1]

    def ended(self) -> bool:
        return None not in [agent.exitcode for agent in self.agents] and not alive([*self.look()])

    @property
    def text(self) -> str:
        return "".join(text.read_text() for text in self.texts)


SFT = dict(device="cpu", dtype="float64", difficulty=1, hidden_size=16, layers=1, batch_size=8, schedule="constant",
           warmup_steps=0, eval_every=0, eval_rows=0, eval_problems=4, save_every=5, keep=1, timeout=TIMEOUT)
LOSSES = {  # how a job loses a rank -> what is said besides
    "a rank is stopped": "did not end after another rank was lost, and is killed",
    "a rank is killed": "Signal 9", "the first torchrun is killed": "", "the second torchrun is killed": ""}


def losses(run: Path) -> list[tuple[int, float]]:
    """Step and loss of what a run has logged so far."""
    rows = read_metrics(run / "metrics.jsonl") if (run / "metrics.jsonl").is_file() else []
    return [(row["step"], row["loss"]) for row in rows]


def lose(job: Job, what: str) -> None:
    if what == "a rank is killed":
        os.kill(job.rank(1), signal.SIGKILL)
    elif what == "a rank is stopped":
        os.kill(job.rank(0), signal.SIGSTOP)
    else:
        job.agents["second" in what].kill()


def test_two_machines_train_as_one_process_end_together_whatever_is_lost_and_go_on(tmp_path):
    @contextlib.contextmanager
    def under_way(folder: Path):
        """A job that trains; a second and third start, if on a busy machine a rank came TIMEOUT after the other."""
        run = folder / "run"
        folder.mkdir(exist_ok=True)
        flags = flags_of(train_sft.Config(run_dir=str(run), steps=10**6, **SFT))
        for attempt in range(3):
            before = len(losses(run))
            resume = ["--resume"] if latest_checkpoint(run) else []
            with Job(folder, "train_sft.py", *flags, *resume, machines=2) as job:
                wait_until(lambda n=before, job=job: len(losses(run)) > n + 6 or job.ended(), for_a_start())
                if len(losses(run)) > before + 6:
                    assert len(job.look()) == 6, "two of each: torchrun, rank, guard"
                    yield job
                    return
                late = job.ended() and LOST.search(job.text)
                assert late and attempt < 2, f"after {before} steps: {job.text[-3000:]}"

    def check(job: Job, what: str, limit: float) -> None:
        assert wait_until(job.ended, limit), f"{what}: {alive([*job.seen])} live on\n{job.text[-3000:]}"
        assert any(agent.exitcode for agent in job.agents)
        # A rank says so itself, or on a busy machine its guard was sooner.
        assert re.search("another rank.*--resume to go on", job.text) and LOSSES[what] in job.text, what

    stopped, *others = LOSSES
    with under_way(tmp_path / "stopped") as stalled:
        lose(stalled, stopped)  # its timeout runs while the others are lost
        for what in others:
            with under_way(tmp_path / "killed") as job:
                lose(job, what)
                check(job, what, SLACK)
        check(stalled, stopped, SLACK + TIMEOUT + GRACE)
    run = tmp_path / "killed/run"
    steps = len(losses(run)) + 3
    for folder, resume in ((run, True), (tmp_path / "alone", False)):  # in another layout, and one without any loss
        train_sft.main(train_sft.Config(run_dir=str(folder), steps=steps, resume=resume, **SFT))
    (steps, ours), (alone, theirs) = (zip(*losses(folder), strict=True) for folder in (run, tmp_path / "alone"))
    assert steps == alone and ours == pytest.approx(theirs, rel=1e-7)


ENDINGS = {  # of the second of two ranks, or of its torchrun, while the first does nothing
    "broken": "if mesh.dp_rank == 1:\n    raise RuntimeError('broken microbatch')\ntime.sleep(300)\n",
    "killed": "pathlib.Path(__file__).with_name('ready').touch()\ntime.sleep(300)\n",
    "in good order": f"time.sleep(mesh.dp_rank * {GRACE + 1})\nprint('is done')\n",
}


@pytest.fixture(scope="module")
def endings(tmp_path_factory) -> Iterator[dict[str, Job]]:
    """Jobs that wait for most of their time, in which others can run."""
    root = tmp_path_factory.mktemp("endings")
    with contextlib.ExitStack() as stack:
        jobs = {}
        for name, ending in ENDINGS.items():
            script = root / name / "script.py"
            script.parent.mkdir()
            script.write_text("import pathlib, time\nfrom minirl.parallel import barrier, init_mesh\n"
                              f"mesh = init_mesh('cpu')\nbarrier(mesh)\n{ending}")
            jobs[name] = stack.enter_context(Job(script.parent, str(script), ranks=2))
        yield jobs


@pytest.mark.usefixtures("endings")
def test_sigterm_to_torchrun_saves_before_the_workers_leave(tmp_path):
    run = tmp_path / "run"
    options = SFT | dict(run_dir=str(run), steps=10**6, save_every=10**6)
    with Job(tmp_path, "train_sft.py", *flags_of(train_sft.Config(**options)), ranks=2) as job:
        assert wait_until(lambda: len(losses(run)) > 2 or job.ended(), for_a_start()) and not job.ended(), job.text
        job.agents[0].terminate()
        assert wait_until(job.ended, SLACK), job.text[-3000:]
        last = losses(run)[-1][0]
        assert latest_checkpoint(run) == run / f"step_{last}" and last > 2, job.text[-3000:]


@pytest.mark.usefixtures("endings")
def test_what_is_wrong_on_all_ranks_is_said_once(tmp_path):
    script = tmp_path / "script.py"  # in which the others wait until torchrun ends them, however late the first rank is
    script.write_text("import train_sft\nfrom minirl.config import run\nfrom minirl.parallel import mesh\n"
                      "mesh.LATER = 600\nrun(train_sft.main, train_sft.Config)\n")
    with Job(tmp_path, str(script), "--device", "cpu", "--batch-size", "5", "--run-dir", str(tmp_path / "run"),
             ranks=2) as job:
        assert wait_until(job.ended, for_a_start()) and job.agents[0].exitcode
        assert re.findall("^error: .*", job.text, re.M) == [
            "error: 5 rows of --batch-size do not divide over 2 replicas: use a multiple of 2"]


def test_an_exception_and_a_killed_torchrun_end_a_job_and_ranks_that_end_in_good_order_are_left_alone(endings):
    broken, killed, good = endings.values()
    assert wait_until((killed.texts[0].parent / "ready").exists, len(endings) * for_a_start()), killed.text
    assert len(killed.look()) == 5
    killed.agents[0].kill()
    assert wait_until(killed.ended, 10), "ranks of a killed launcher live on"
    assert wait_until(broken.ended, len(endings) * for_a_start()) and broken.agents[0].exitcode
    assert "RuntimeError: broken microbatch" in broken.text and 'script.py", line 6' in broken.text
    assert wait_until(good.ended, len(endings) * for_a_start())
    assert good.agents[0].exitcode == 0 and good.text.count("is done") == 2, good.text
