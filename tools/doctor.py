"""Whether this machine can do a run, how fast its parts are, and the command that repairs what is wrong.

    python -m tools.doctor                                                    # for the job to try first
    python -m tools.doctor --config-name=c4_a100x8_1b                         # for that run: its mesh, its run folder
    python -m tools.doctor mesh.d=2 mesh.t=4 paths.root_working_dir=s3://bucket/runs

Takes a run's configuration and looks at versions, optional parts, devices, matrix products, the collectives over each
axis of the mesh, the data, and the store of checkpoints. Exits with 0 when all that the run needs is there and works,
with 1 when something is missing or broken; an optional part that is missing and that the run's keys do not ask for, or
a version that is not the tested one, is only said.
"""

# Nothing but Python's own here: it must run where packages are missing. tools/doctor_measure.py needs them.
import sys
from collections.abc import Iterable
from typing import Any

from tools.doctor_packages import BROKEN, Finding, needed_parts


class Report:
    """Prints findings as they come, one process for all but each its own wrong ones, and knows which are wrong."""

    def __init__(self):
        self.wrong: list[str] = []

    def add(self, findings: Iterable[Finding], *, is_leader: bool = True) -> None:
        for finding in findings:
            if finding.status == BROKEN:
                self.wrong.append(finding.part)
            if is_leader or finding.status == BROKEN:
                print("\n".join(finding.lines()), flush=True)

    def verdict(self) -> str:
        """'' when nothing is wrong."""
        if not self.wrong:
            return ""
        return f"missing or broken: {', '.join(self.wrong)}; the fix of each is below it"


def main(config: Any) -> None:
    """Whether this machine can do a run, how fast its parts are, and the command that repairs what is wrong."""
    from runtime.terminal import RunError
    from tools.doctor_measure import measured

    report, is_leader = Report(), None
    for findings, is_leader in measured(config):
        report.add(findings, is_leader=is_leader)
    if verdict := report.verdict():
        raise RunError(verdict)
    if is_leader:
        print("\nNothing that this run needs is missing or broken.")


def run() -> None:
    """Looks at the packages first, since the configuration needs them."""
    wants_text = {"--help", "-h", "--cfg", "-c", "--hydra-help", "--info", "-i"} & set(sys.argv)
    findings = [] if wants_text else list(needed_parts())
    report = Report()
    if any(finding.status == BROKEN for finding in findings):  # else they are printed when it is known who prints
        report.add(findings)
        sys.exit(f"error: {report.verdict()}; the rest is looked at when they are there")
    try:
        from runtime import program
        from runtime.config import command_line
        from tools.doctor_measure import config_class

        trainer = program.of_command_line(sys.argv[1:])
    except (ImportError, RuntimeError) as error:  # JAX and jaxlib that do not go together, a library of the system
        report.add(findings)
        sys.exit(f"error: what is installed cannot be imported: {error}; fix: pip install -r requirements-cpu.txt")

    command_line.run(main, config_class(trainer))


if __name__ == "__main__":
    run()
