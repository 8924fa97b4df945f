"""The whole quality gate: `python -m tests.quality.run [--members 31b ...] [--questions 200] [--device cuda]`, or `make quality`.

Prints rows of three tables in Markdown: accuracy of each skill, from transformers and from our engine; answers that differ for
each setup; what each fault changes (a lost sum: of the CPU's collectives only). Exit code 1 when a skill is below 95 %, an fp32
answer differs, or a fault changes less than 5 % of the stories.

--format writes members in these formats (`KINDS` of tests/support/engine/quantised.py). transformers then has the weights that such
a folder stands for. Where a format rounds activations, answers within `gate.ROUNDED` of transformers' may differ.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from deploy.models.nano import trained
from deploy.models.resolve import resolve
from tests.quality.faults import FAULTS, Everywhere
from tests.quality.gate import PASS, SETUPS, SHARE, Grades, Judge, QuestionSet, Setup, answer, grade, questions, untaught
from tests.support.engine.quantised import KINDS, dequantised, saved, widths_of
from tests.support.judge.oracle import load_oracle

FAULT_SAMPLE = 48  # stories, at most


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.quality.run", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--members", nargs="+", default=trained(), choices=trained())
    parser.add_argument("--questions", type=int, default=200, help="of each skill; four times as many stories")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4], help="sizes to try")
    parser.add_argument("--setups", nargs="+", choices=[setup.name for setup in SETUPS], help="those to try (default: all)")
    parser.add_argument("--faults", action=argparse.BooleanOptionalAction, default=True, help="also plant each fault")
    parser.add_argument("--format", nargs="+", default=["plain"], choices=("plain", *KINDS), help="of the members' matrices")
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", "fp8"))
    parser.add_argument("--head", default="bf16", choices=("bf16", "fp8"), help="fp8 gives the same greedy answers")
    parser.add_argument("--weights", default="auto", choices=("auto", "nvfp4"), help="nvfp4 keeps the four bits of NVFP4 folders")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(2)
    chosen = [setup for setup in SETUPS if setup.tp in args.tp and (args.setups is None or setup.name in args.setups)]
    setups = [replace(setup, device=args.device, kv_dtype=args.kv_dtype, head=args.head, weights=args.weights) for setup in chosen]
    lost_sum = 2 in args.tp and args.device == "cpu"
    faults = [fault for fault in FAULTS if args.faults and fault != "none" and (fault != "lost sum" or lost_sum)]
    failed = []
    for member in args.members:
        for kind in args.format:
            with in_format(member, kind, max(setup.tp for setup in setups), args.weights) as folders:
                rounds = args.kv_dtype == "fp8" or not (kind == "plain" or kind.startswith("int4"))
                asked = [replace(setup, name=f"{kind} {setup.name}", rounds=rounds) for setup in setups]
                failed += whole(member, args, asked, [] if kind != "plain" or rounds else faults, *folders)
    sys.stdout.write("".join(f"FAILED {complaint}\n" for complaint in failed) or "passed\n")
    sys.exit(bool(failed))


@contextmanager
def in_format(member: str, kind: str, tp: int, weights: str) -> Iterator[tuple[Path, Path]]:
    """The member's folder in a format, and the plain one that it stands for. int4 leaves matrices plain whose widths it does not
    cut."""
    folder = resolve(f"nano:{member}")
    if kind == "plain":
        yield folder, folder
        return
    with tempfile.TemporaryDirectory() as made:
        widths = widths_of(folder) if kind.startswith("int4") else {}
        ignore = tuple(matrix for matrix, width in widths.items() if width % (64 * tp))
        to = saved(folder, Path(made) / "saved", kind=kind, ignore=ignore)
        yield to, dequantised(to, Path(made) / "plain", four_bits=weights == "nvfp4")


def whole(
    member: str, args: argparse.Namespace, setups: list[Setup], faults: list[str], folder: Path, plain: Path
) -> Iterator[str]:
    """Every setup and every fault of one member in `folder`; yields what fails. plain: what transformers reads."""
    sys.stdout.write(untaught(member) + "\n")
    question_set = QuestionSet.of(member, questions(member, args.questions), args.seed, folder)
    model = load_oracle(plain).to(args.device)
    judge = Judge(question_set, model)
    for setup in setups:
        run = answer(question_set, setup)
        grades = grade(question_set, run, judge, setup.tie, theirs=setup is setups[0])
        row = [member, setup.name, grades.asked.total(), grades.right.total(), grades.differing]
        tell(*row, grades.ties.total(), run.preemptions, f"{run.seconds:.0f} s")
        if setup is setups[0]:
            skills(member, grades)
        yield from (f"{member} {setup.name}: {skill}" for skill in grades.asked if grades.accuracy(skill) < PASS)
        if setup.dtype == "float32" and grades.differing:
            yield f"{member} {setup.name}: {grades.differing} answers differ: {+grades.differ}"
    sample = QuestionSet.of(member, {"story": min(FAULT_SAMPLE, 4 * args.questions)}, args.seed)
    second = Judge(sample, model)
    for fault in faults:
        setup = Setup(fault, tp=2 if fault == "lost sum" else 1, device=args.device, graphs=False)
        grades = grade(sample, answer(sample, setup, Everywhere(fault)), second, setup.tie)
        tell(member, fault, grades.asked.total(), grades.right.total(), "", f"{grades.differing} ({grades.share:.0%})")
        if grades.share < SHARE:
            yield f"{member} {fault}: only {grades.share:.1%} differ"


def skills(member: str, grades: Grades) -> None:
    """Accuracy, transformers beside ours."""
    for skill, asked in grades.asked.items():
        tell(member, skill, asked, f"{grades.theirs[skill] / asked:.1%}", f"{grades.accuracy(skill):.1%}")


def tell(*cells: object) -> None:
    """One row of a table."""
    sys.stdout.write("| " + " | ".join(map(str, cells)) + " |\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
