"""Writes the report.html of a run folder again: after samples.txt has come to it, say, or with this version's look.

python -m tools.sample runs/first > runs/first/samples.txt
python -m tools.report runs/first
"""

import argparse
import sys

from runtime.terminal import RunError
from runtime.tracking.report import write_report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="python -m tools.report"
    )
    parser.add_argument("run_folder", nargs="+")
    for folder in parser.parse_args().run_folder:
        try:
            write_report(folder)
        except RunError as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
