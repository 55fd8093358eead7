"""tools.score: log likelihoods against transformers and a plain model, tasks of files and of lm-eval-harness."""

import dataclasses
import importlib.util
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest
import reference
import small
from pages import ROOT
from parts import assert_refuses, says
from published import FOLDER, NAMES, on_mesh, weights_of
from ragged import write_lines
from several_hosts import records, where

from models import huggingface, likelihoods
from models.decoding import Generator
from runtime import program
from runtime.checkpoints.checkpoint import open_newest, read_leaf
from runtime.data import tokenizers
from runtime.data.sources import kept_tokenizer
from runtime.data.tokenizers import ChatError
from runtime.terminal import RunError
from tools import ready, score, tasks
from tools.harness import Harness, Judge

SCORED = [name for name in NAMES if (FOLDER / name / "scores.json").exists()]
QUICK = ("llama", (2, 2, 2)), ("gemma3", (2, 2))
CASES = [(name, mesh) for name in SCORED for mesh in ((1, 1), (2, 2))]


# == Log likelihoods ===================================================================================================
def test_a_shorter_model_is_named(capsys):
    """What is read at once is at most what the model knows; nothing is said where it knows as much."""
    family = SimpleNamespace(KIND="both", __name__="models.t5")
    source = SimpleNamespace(family=family, model=None, folder=None)
    with on_mesh(1, 1), mock.patch.object(tasks, "Reader"):
        made = tasks.Scorer(ready.ReadyModel(None, source, None, (), (), 64), rows=2, length=100)
    assert made.length == 64 == made.ready.at_most(64)
    assert capsys.readouterr().err == "note: length = 64, not 100: the model knows no longer texts\n"


def scorer_of(name, pool, length=64):
    source = huggingface.open_weights(FOLDER / name, pool)
    generator = Generator(source.family, source.model, weights_of(source, pool)[0])
    return tasks.Scorer(ready.ReadyModel(generator, source, None, (), (), length), rows=2, length=length)


@pytest.mark.parametrize("case", [*QUICK, *small.slow(*(case for case in CASES if case not in QUICK))], ids=str)
def test_log_likelihoods_are_those_of_transformers(case, pool):
    """Nine packed continuations of three contexts agree to 1e-4 nats, and so does whether greedy decoding writes them.
    Scored one by one they are the same to rounding. The check accepts the program."""
    name, mesh = case
    expected = json.loads((FOLDER / name / "scores.json").read_text())
    pairs = [(record["context"], record["continuation"]) for record in expected]
    with on_mesh(**dict(zip("dtr", mesh))):
        scorer = scorer_of(name, pool)
        found, alone = scorer(pairs), [scorer([pair])[0] for pair in pairs]
    for sums, atol in (([record["log_likelihood"] for record in expected], 1e-4), ([a for a, _ in alone], 2e-5)):
        np.testing.assert_allclose([a for a, _ in found], sums, atol=atol, rtol=0)
    for greedy in ([record["is_greedy"] for record in expected], [greedy for _, greedy in alone]):
        assert [found_greedy for _, found_greedy in found] == greedy


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORED)
def test_log_likelihoods_are_those_of_lm_eval_harness(name, pool, record_property):
    """200 packed pairs agree to 1e-4 nats with the harness' own HFLM, and the verdicts are equal."""
    kept = json.loads((FOLDER.parents[1] / "golden/harness.json").read_text())
    with on_mesh(2, 2):
        found = scorer_of(name, pool)(kept["pairs"])
    (sums, greedy), (expected, is_greedy) = zip(*found), zip(*kept["found"][name])
    furthest = np.abs(np.array(sums) - expected).max()
    record_property("summary", f"{name}: 200 log likelihoods within {furthest:.1e} nats of HFLM's")
    assert len(sums) == 200 and furthest <= 1e-4 and greedy == is_greedy


@pytest.mark.parametrize("length", [64, 300])
def test_packed_rows_have_all_that_each_continuation_needs(length):
    """Each continuation has places of its own and sees its context and itself, in the order of positions; a context
    that fits is read once."""
    rng = np.random.default_rng(0)
    contexts = [rng.integers(1, 99, n).tolist() for n in rng.integers(1, 40, 12)]
    pairs = [(contexts[n], rng.integers(1, 99, rng.integers(1, 20)).tolist()) for n in rng.integers(0, 12, 50)]
    rows, places = likelihoods.pack(pairs, length)
    assert rows.shape[1:] == (5, min(length, 128))
    taken = np.zeros((len(rows), rows.shape[2]), int)
    for (context, after), ((row, place),) in zip(pairs, places):
        tokens, targets, number, continuation, position = rows[row]
        taken[row, place] += 1
        own = continuation[place][0]
        seen = (number == number[place][0]) & np.isin(continuation, (0, own))
        assert number[place][0] > 0 and own > 0
        assert tokens[seen].tolist() == [*context, *after[:-1]] and position[seen].tolist() == list(range(seen.sum()))
        assert targets[place].tolist() == after
    assert taken.max() == 1
    shared = [(contexts[0], [1, 2]), (contexts[1], [3]), (contexts[0], [4])]
    (row,), _ = likelihoods.pack(shared, 128)
    assert (row[2] > 0).sum() == len(contexts[0]) - 1 + 2 + 1 + len(contexts[1])


# == Tasks of files ====================================================================================================
@pytest.fixture
def said(called, proved_elsewhere, tmp_path, monkeypatch):
    """What `python -m tools.score <arguments>` prints, or says of an error, in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments, status=0):
        found, out, error = called(score.main, score.Score, *arguments)
        assert found == status
        return error if status else out

    return call


def values_of(table):
    """{(task, metric): value} of what is printed."""
    return {tuple(line.split()[:2]): float(line.split()[2]) for line in table.splitlines()[1:]}


def as_bits(nats, count):
    """The bits a byte, as the table rounds them."""
    return pytest.approx(nats / count / math.log(2), abs=1e-4)


TEXT = "the cat sat on the mat. the mat sat on the cat."


def nats_of(cat_run, text, length, pool, bos_id=None, **keys):
    """What a plain float64 model, with these keys, gives a text of bytes, in windows of `length`, each after one byte
    of the window before, or bos_id, the last filled up."""
    source = huggingface.open_weights(cat_run, pool)
    model = dataclasses.replace(source.model, **keys)
    with on_mesh(1, 1):
        weights = jax.tree.map(np.asarray, weights_of(source, pool)[0])
    tree = {key: value for key, value in dataclasses.asdict(weights).items() if value is not None}
    tree["transformer"] = {key: value for key, value in tree["transformer"].items() if value is not None}
    ids, nats = [0, *(byte + 1 for byte in text.encode())], 0.0
    for start in range(1, len(ids), length):
        end = min(start + length, len(ids))
        first = max(end - length - 1, 0) if start > 1 else 0
        targets = np.array([ids[first + 1 : end]], np.uint32)
        starts = np.zeros(targets.shape, bool)
        logits = reference.logits(
            tree, reference.Batch(targets, starts, ~starts), model, bos_id=ids[first] if bos_id is None else bos_id
        )[0]
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        nats -= log_probs[np.arange(len(logits)), targets[0]][start - first - 1 :].sum()
    return nats


def test_bits_a_byte_are_those_of_the_plain_formula(cat_run, said, pool):
    """The float64 reference gives the same for a text in three windows of 20 bytes and for lines of .jsonl."""
    Path("text.txt").write_text(TEXT)
    write_lines("texts.jsonl", [{"text": TEXT[:13], "from": "a cat"}, {"text": TEXT}])
    found = values_of(said(cat_run, "text.txt", "texts.jsonl", "length=20", "rows=2"))
    whole, part = (nats_of(cat_run, text, 20, pool) for text in (TEXT, TEXT[:13]))
    assert found["text.txt", "bits_per_byte"] == as_bits(whole, len(TEXT))
    assert found["text.txt", "perplexity"] == pytest.approx(math.exp(whole / len(TEXT)), abs=1e-4)
    assert found["texts.jsonl", "bits_per_byte"] == as_bits(whole + part, len(TEXT) + 13)


def test_choices_and_a_file_of_answers(cat_run, said):
    """A model that knows one sentence chooses how it goes on; each answer is a line, and what is too long is cut."""
    write_lines("exam.jsonl", [
        {"context": "the cat sat", "choices": ["in a hat", "on the mat."], "answer": 1},
        {"context": "the cat sat on the mat. " * 3, "choices": ["a dog", "the cat", "zebras"], "answer": 2},
    ])  # fmt: skip
    table = said(cat_run, "exam.jsonl", "to=out.jsonl")
    assert [values_of(table)["exam.jsonl", name] for name in ("acc", "acc_norm", "acc_bytes")] == [0.5, 0.5, 0.5]
    assert "exam.jsonl  acc        0.5000  0.5000   2" in table
    first, second = map(json.loads, Path("out.jsonl").read_text().splitlines())
    assert (first["task"], first["number"], first["acc"], second["acc"]) == ("exam.jsonl", 0, 1.0, 0.0)
    assert len(second["log_likelihoods"]) == 3 and np.argmax(second["log_likelihoods"]) == 1
    assert first["context"] == "the cat sat"


def test_normalized_accuracy_by_hand():
    """With log likelihoods -4 and -6 the first is best by sum, and the longer one by character and by byte."""
    scorer = mock.Mock(return_value=[(-4.0, False), (-6.0, False)], pair=lambda *pair: pair)

    def scored(choices, answer):
        record = tasks.Choices(context="", choices=choices, answer=answer)
        (found,) = tasks.score_choices(scorer, [record], tasks.Scoring())
        return [found[name] for name in ("acc", "acc_norm", "acc_bytes")]

    assert scored(("ab", "abcd"), 0) == [1, 0, 0]
    assert scored(("ab", "abcd"), 1) == [0, 1, 1]
    assert scored(("éé", "abcd"), 0) == [1, 0, 1]  # 2 characters, 4 bytes


def test_exact_match_and_rouge_by_hand():
    """Two of three words are those of the answer, one of two pairs; of several right answers the best counts."""
    writer = SimpleNamespace(write=lambda prompts, config: ["the cat sat", " the cat ran\n"])
    right = ("no", "the cat ran")
    records = [tasks.Question(question="?", answer=right) for _ in range(2)]
    near, same = tasks.score_questions(writer, records, tasks.Scoring())
    third = pytest.approx(2 / 3)
    assert [near[name] for name in ("exact_match", "rouge1", "rouge2", "rougeL")] == [0.0, third, 0.5, third]
    assert [same[name] for name in ("exact_match", *tasks.ROUGE)] == [1.0] * 4


@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_in_a_chat_ends_with_its_turn(chat):
    """A tokenizer without a token for the end of ChatML's turns has it among the stops, in a chat alone."""
    scorer = SimpleNamespace(write=lambda prompts, config: given.append(config.stop) or ["a"], ready=mock.Mock())
    given, scorer.ready.chat_stops = [], lambda stop: (*stop, "<|im_end|>")
    tasks.score_questions(scorer, [tasks.Question(question="?", answer=("a",))], tasks.Scoring(chat=chat, stop=(".",)))
    assert given == [(".", "<|im_end|>") if chat else (".",)]


def test_what_cannot_be_asked_is_refused():
    """A chat without a template, and answers that leave no room for a question."""
    scorer, no_template = tasks.Scorer.__new__(tasks.Scorer), ChatError("the tokenizer bytes_utf8 has no chat template")
    scorer.length, scorer.kind, scorer.ready = 32, "decoder", mock.Mock(ids_of=mock.Mock(side_effect=no_template))
    config = ready.Writing(tokens=8)
    assert_refuses("chat=true: … no chat template", scorer.write, [[{"role": "user", "content": "?"}]], config)
    assert_refuses("tokens = 32: expected fewer than … 32", scorer.write, ["?"], dataclasses.replace(config, tokens=32))


def test_questions_are_answered(cat_run, said):
    """What the model goes on with, cut at `stop`, is compared with the answer."""
    questions = {"the cat sat on": "the mat", "the cat": ["x"]}
    write_lines("ask.jsonl", [{"question": question, "answer": answer} for question, answer in questions.items()])
    found = values_of(said(cat_run, "ask.jsonl", "tokens=12", "stop=[.]"))
    assert found["ask.jsonl", "exact_match"] == 0.5 and 0.5 <= found["ask.jsonl", "rougeL"] < 1
    assert "tokens = 64: expected fewer than the 32" in said(cat_run, "ask.jsonl", "tokens=64", status=1)


def test_a_missing_package_is_one_line(said, monkeypatch):
    """The line has the command that installs it; nothing is read before."""
    for package in ("rouge_score", "lm_eval"):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules, f"{package}.tasks", raising=False)
    write_lines("ask.jsonl", [{"question": "a", "answer": "b"}])
    for package, given in (("rouge_score", "ask.jsonl"), ("lm_eval", "harness=arc_easy")):
        parts = f"error: … needs the package {package} … pip install -r requirements-score.txt"
        assert says(parts, refused := said("nowhere", given, status=1)) and refused.count("\n") == 1


@pytest.mark.parametrize("content, message", [
    ("", "the task FILE is empty"),
    ("x", "FILE, line 1: expected an object: "),
    ("[1]", "FILE, line 1: expected an object … choices, question or text"),
    ('{"answer": 1}', "FILE, line 1: expected an object … choices, question or text"),
    ('{"text": "a"}\n{"tex": "a"}', "FILE, line 2: text is missing: expected text"),
    ('{"text": ""}', 'FILE, line 1: text = "": expected text, not empty'),
    ('{"choices": ["a", ""], "context": "", "answer": 0}', 'FILE, line 1: choices[1] = "": expected text'),
    ('{"choices": ["a"], "context": "", "answer": 1}', "FILE, line 1: answer = 1: … 1 choices, from 0"),
    ('{"choices": ["a"], "context": "", "answer": "a"}', "FILE, line 1: answer"),
])  # fmt: skip
def test_a_task_that_is_wrong_is_refused(said, content, message):
    """One line with the file and the line in it, before the model is read."""
    Path("task.jsonl").write_text(content)
    assert says(message.replace("FILE", "task.jsonl"), said("nowhere", "task.jsonl", status=1))


@pytest.mark.parametrize("arguments, message", [
    ([], "nothing to score: name files, or harness=TASK,TASK"),
    (["nowhere.txt"], "the task nowhere.txt cannot be read: "),
    (["harness=arc_easy", "chat=true"], "chat=true is for questions in files"),
    ([ROOT / "LICENSE"], "golden/llama has no tokenizer"),
    ([ROOT / "LICENSE", "num_fewshot=2"], "harness = null: include_path and num_fewshot are for"),
    ([ROOT / "LICENSE", "to=/nowhere/x"], "to=/nowhere/x cannot be written: "),
    ([ROOT / "LICENSE", f"to={ROOT}/LICENSE"], "LICENSE is one of the tasks … give another file"),
])  # fmt: skip
def test_what_is_refused(said, arguments, message):
    """One line that says what was expected."""
    assert says(message, said(FOLDER / "llama", *arguments, status=1))


def test_a_refused_call_keeps_the_file_of_answers(said):
    """What to= has is lost only once the model is read and nothing is refused any more."""
    Path("notes.md").write_text("my notes")
    assert "lines that this program did not write" in said(FOLDER / "llama", ROOT / "LICENSE", "to=notes.md", status=1)
    Path("answers.jsonl").write_text(answers := '{"task": "a.txt"}\n')
    said("nowhere", ROOT / "LICENSE", "to=answers.jsonl", status=1)
    assert (Path("notes.md").read_text(), Path("answers.jsonl").read_text()) == ("my notes", answers)


def test_the_perplexity_of_a_run_that_diverged():
    """It is infinite where it is larger than any number, and no error."""
    (_, bits, _), (name, perplexity, _) = tasks.summary([{"log_likelihood": -8000.0, "tokens": 10, "bytes": 40}])
    assert (name, perplexity) == ("perplexity", float("inf")) and bits > 288


def words():
    """A tokenizer of whole words, 3 for unknown ones, which puts <a> and <b>, 1 and 2, around a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    made = Tokenizer(models.WordLevel({"<pad>": 0, "<a>": 1, "<b>": 2, "?": 3}, "?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing("<a> $A <b>", special_tokens=[("<a>", 1), ("<b>", 2)])
    return tokenizers.Tokenizer(name="words", bos_id=0, json=made.to_str())


@pytest.mark.parametrize("kind, own, published", [
    ("decoder", ((0,), ()), ((1,), ())), ("encoder", ((), ()), ((1,), (2,))), ("both", ((), (1, 2)), ((), (1, 2))),
])  # fmt: skip
def test_what_stands_around_a_text(kind, own, published):
    """A run's own texts begin with bos_id if it writes; a published tokenizer says what a text has around it, and what
    an encoder-decoder reads behind it. Bytes have nothing but bos_id."""
    source = huggingface.Source(None, SimpleNamespace(KIND=kind), None, None)
    assert ready.around(source, words()) == own
    source = dataclasses.replace(source, config={})
    assert ready.around(source, words()) == published
    bytes_ = tokenizers.load_tokenizer("bytes_utf8")
    assert ready.around(source, bytes_) == ((0,) if kind == "decoder" else (), ())
    assert ready.around(source, None) == ((), ())


# == While a run trains ================================================================================================
EXAM = [{"context": "the cat sat", "choices": ["on the mat.", "in a hat"], "answer": 0}]


def in_training(source, **keys):
    """What a run's config says to score."""
    keys = {"eval_tasks": (), "eval": Harness(), "initial_weights": None, **keys}
    return SimpleNamespace(
        model=source.model, num_hosts=1, training=SimpleNamespace(tokens=SimpleNamespace(len=32)), **keys
    )


def as_printed(found):
    """{(task, metric): value} of a run's metrics, score/TASK/METRIC."""
    return {tuple(name.split("/")[1:]): round(value, 4) for name, value in found.items()}


def test_a_run_scores_what_its_checkpoint_scores(cat_run, said, pool):
    """A run's weights, scored twice, give the numbers of its checkpoint on the command line."""
    write_lines("exam.jsonl", EXAM)
    Path("text.txt").write_text(TEXT)
    source = huggingface.open_weights(cat_run, pool)
    config = in_training(source, eval_tasks=("exam.jsonl", "text.txt"))
    with on_mesh(1, 1):
        weights, _ = weights_of(source, pool)
        scorer = tasks.InRun(config, kept_tokenizer(cat_run), lambda trained: trained, 0)
        (found, samples), again = scorer(weights), scorer(weights)
    assert (found, samples) == again and samples == "" and scorer.scorer.ready.generator.weights is None
    assert as_printed(found) == values_of(said(cat_run, "exam.jsonl", "text.txt"))
    assert sorted(scorer.metrics) == sorted(found)
    config.initial_weights = FOLDER / "llama"  # published: their config and tokenizer say what ends and begins a text
    with on_mesh(1, 1):
        scorer = tasks.InRun(config, words(), lambda trained: trained, 0)
        scorer(weights)
    ends = json.loads((FOLDER / "llama/config.json").read_text())["eos_token_id"]
    assert scorer.scorer.ready.start == (1,) and scorer.scorer.ready.generator.ends.tolist() == [ends]
    with pytest.raises(RunError, match=r"^eval_tasks, eval.harness: expected data that name"):
        tasks.InRun(config, None, None, 0)


def test_scores_do_not_depend_on_what_else_is_in_a_row(pool):
    """A mixture whose capacity drops tokens of long rows has transformers' log likelihoods."""
    source = huggingface.open_weights(FOLDER / "mixtral", pool)
    tight = dataclasses.replace(source, model=dataclasses.replace(source.model, capacity=0.5))
    expected = json.loads((FOLDER / "mixtral/scores.json").read_text())
    config = in_training(tight)
    config.training.tokens.len = 64
    with on_mesh(1, 1):
        weights, _ = weights_of(source, pool)
        scores = tasks.InRun(config, words(), lambda trained: trained, 0)
        scores(weights)
        scores.scorer.ready.generator.take(weights)
        found = scores.scorer([(record["context"], record["continuation"]) for record in expected])
    wanted = [record["log_likelihood"] for record in expected]
    np.testing.assert_allclose([nats for nats, _ in found], wanted, atol=1e-4, rtol=0)


def test_a_run_scores_whole_rows(pool, tmp_path):
    """A mesh that splits rows, into more parts than there are heads, scores and draws the same."""
    pytest.importorskip("rouge_score")
    write_lines(tmp_path / "questions.jsonl", [{"question": "a b c", "answer": ["d"]}])
    (tmp_path / "text.txt").write_text(TEXT)
    source, found = huggingface.open_weights(FOLDER / "mixtral", pool), []
    config = in_training(source, eval_tasks=tuple(str(tmp_path / name) for name in ("text.txt", "questions.jsonl")))
    for axes in ({}, {"d": 2, "c": 4}):
        with on_mesh(**axes):
            weights, _ = weights_of(source, pool)
            figures, samples = tasks.InRun(config, words(), lambda w: w, 0)(weights)
            found.append((pytest.approx(figures, rel=1e-5), samples))
            assert (figures, samples) == found[0] and samples


@pytest.mark.slow
def test_a_run_logs_its_scores(cat_run, said, tmp_path):
    """metrics.jsonl of a train_any run with adapters has the tasks' numbers at each validation, the last ones those of
    the merged weights; its page has an answer, and the first best score ends the run."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    files = [write_lines(tmp_path / "exam.jsonl", EXAM), text]
    if importlib.util.find_spec("rouge_score"):
        files.append(write_lines(tmp_path / "ask.jsonl", [{"question": "the cat sat on the", "answer": "mat"}]))
    overrides = f"""
        flat_tokens.filespec={cat_run.parent}/text.zarr paths.root_working_dir={tmp_path} paths.model_name=run
        mesh.c=2 initial_weights={cat_run} lora.rank=2 training.learning_rate=0.3
        model.compute_dtype=float32 training.tokens.batch=8 training.tokens.len=32 training.steps=12
        training.warmup_steps=0 training.steps_for_lr=12 eval_interval=2 validation_batches=1 training.seed=1
        eval_tasks=[{",".join(map(str, files))}] patience=2 best_by=score/exam.jsonl/acc
    """
    command = [sys.executable, "-m", "train_any", "--config-name=finetune_smollm2", *overrides.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    scored = [line for line in records(tmp_path / "run") if "score/exam.jsonl/acc" in line]
    of_one = [line["score/exam.jsonl/acc"] for line in scored]  # each 0 or 1, so that it is best at step 2, 4 or 6
    end = 2 * of_one.index(max(of_one)) + 6
    assert [line["step"] for line in scored] == list(range(2, end + 1, 2))
    assert f"{end} of 12: the best score/exam.jsonl/acc, " in " ".join(done.stdout.split())
    bits = values_of(said(tmp_path / "run", text, "length=32", "compute_dtype=float32"))[str(text), "bits_per_byte"]
    logged = [line["score/text.txt/bits_per_byte"] for line in scored]
    assert logged[-1] == pytest.approx(bits, abs=2e-4) and abs(logged[0] - logged[-1]) > 0.01
    if len(files) > 2:
        assert all(line["score/ask.jsonl/exact_match"] in (0, 1) for line in scored)
        assert (tmp_path / "run/samples.txt").read_text().startswith(f"after step {end}\n\nthe cat sat on the\n→ ")


# == A run's own program ===============================================================================================
def test_its_own_program_scores_a_run_as_models_do(cat_run, said):
    """Choices and a text, on two devices: the log likelihoods are those of models/."""
    write_lines("exam.jsonl", EXAM)
    Path("text.txt").write_text(TEXT[:31])
    lines = []
    for keys in ([], ["program=run", "mesh.d=2"]):
        said(cat_run, "exam.jsonl", "text.txt", "to=out.jsonl", *keys)
        found = map(json.loads, Path("out.jsonl").read_text().splitlines())
        lines.append([x for line in found for x in line.get("log_likelihoods", [line.get("log_likelihood")])])
    assert lines[0] == pytest.approx(lines[1], abs=1e-4) and len(lines[0]) == 3


@pytest.fixture
def changed_run(cat_run, tmp_path, monkeypatch):
    """A copy of a run whose program turns queries and keys by another base than its config says."""
    source, changed, kept = (ROOT / "train.py").read_text(), tmp_path / "changed", program._record
    text = source.replace("frequency = base ** ", "frequency = 50.0 ** ")
    shutil.copytree(cat_run, changed)
    (changed / "program.py").write_text(text)
    monkeypatch.setattr(program, "_record", lambda of: kept(of) if "config" not in of else {**kept(of), "source": text})
    return changed


def test_a_changed_program_is_scored_by_itself(changed_run, said, pool):
    """models/ refuse the run, and name what differs and program=run. With that its bits a byte are those of the plain
    formula with the other base; all windows begin with bos_id. A comment in program.py changes nothing."""
    Path("text.txt").write_text(TEXT[:31])
    refused = said(changed_run, "text.txt", status=1)
    assert says("differ (rotary) … tools.score program=run", refused)
    found = values_of(said(changed_run, "text.txt", "program=run"))
    nats, before = (nats_of(changed_run, TEXT[:31], 32, pool, **keys) for keys in ({"rope_max_timescale": 50.0}, {}))
    assert found["text.txt", "bits_per_byte"] == as_bits(nats, 31) and abs(nats - before) > 0.1
    Path("text.txt").write_text(TEXT)
    with (changed_run / "program.py").open("a") as file:
        file.write("# a comment\n")
    found = values_of(said(changed_run, "text.txt", "program=run", "length=20"))
    nats = nats_of(changed_run, TEXT, 20, pool, bos_id=0, rope_max_timescale=50.0)
    assert found["text.txt", "bits_per_byte"] == as_bits(nats, 47)


def test_any_trainer_scores_its_run(cat_run, said, monkeypatch, tmp_path, pool, capsys):
    """The smallest one, which has other axes and no compute_dtype, on a mesh of t: as numpy has it. A mesh that it
    lacks is refused."""
    abc = program.load("tests.abc_trainer")
    data = f"flat_tokens.filespec={cat_run.parent}/text.zarr"
    keys = [*where(tmp_path / "abc"), data, "model.vocab=260", f"--config-dir={ROOT}/tests", "--config-name=abc"]
    assert small.start(monkeypatch, abc.main, abc.Config, *keys) == 0
    capsys.readouterr()
    Path("text.txt").write_text(TEXT[:31])
    own = [tmp_path / "abc", "text.txt", "program=run"]
    found = values_of(said(*own, "mesh.t=2"))
    arrays = open_newest(str(tmp_path / "abc"), pool)
    table, w_in, w_out = (read_leaf(arrays, f"weights/{name}", pool) for name in ("table", "w_in", "w_out"))
    ids = [0, *(byte + 1 for byte in TEXT[:31].encode())]
    x = table[ids[:-1]]
    logits = (x + np.tanh(x @ w_in) @ w_out.T) @ table.T
    nats = (np.log(np.exp(logits).sum(-1)) - logits[np.arange(31), ids[1:]]).sum()
    assert found["text.txt", "bits_per_byte"] == as_bits(nats, 31)
    for key, message in (
        ("mesh.d=2", "mesh.d: the program of … has the axes a, t, c"),
        ("compute_dtype=float32", "compute_dtype: the model of … no such key: leave it out"),
    ):
        assert says(message, said(*own, key, status=1))


def test_what_its_own_program_does_not_score(changed_run, said, monkeypatch):
    """Each is refused in one line."""
    write_lines("ask.jsonl", [{"question": "who?", "answer": "a cat"}])
    Path("text.txt").write_text(TEXT)
    own, file = [changed_run, "program=run"], changed_run / "program.py"
    for asked in (["ask.jsonl"], ["harness=arc_easy"], ["text.txt", "rows=2"]):
        assert "program=run scores choices and texts, one by one" in said(*own, *asked, status=1)
    with monkeypatch.context() as patch:
        hashes = program._hashes
        patch.setattr(program, "_hashes", lambda *of: hashes(*of) | {"kernels.attention": "of another"})
        refused = said(*own, "text.txt", status=1)
        assert says("program.py imports what has changed … (kernels.attention)", refused)
        said(*own, "text.txt", "allow_program_change=true")
    with monkeypatch.context() as patch:
        patch.setattr(program, "_record", lambda of: None)
        assert "program.py is not the program that its checkpoint" in said(*own, "text.txt", status=1)
    for change, message in (
        (lambda: file.write_text(f"{file.read_text()}edited = 1\n"), "is not the program that its checkpoint"),
        (lambda: file.write_text("("), "is no Python: SyntaxError"),
        (file.unlink, "cannot be read"),
    ):
        change()
        assert f"program.py {message}" in said(*own, "text.txt", status=1)


# == Tasks of lm-eval-harness ==========================================================================================
ENDINGS = {"ind": 1, "activity_label": "Cats", "ctx_a": "the cat sat", "ctx_b": "", "split_type": "indomain"}
ARC = {"question": "the cat sat on", "choices": {"text": ["a dog", "the mat."], "label": ["A", "B"]}}
HARNESS = {  # the harness's own tasks, with a few lines of their data
    "hellaswag": [
        {**ENDINGS, "endings": [" on a hat", " on the mat."], "label": "1"},
        {**ENDINGS, "endings": [" on the mat.", " zz", " xx"], "label": "2"},
    ],
    "arc_easy": [{**ARC, "answerKey": key} for key in "BBA"],
    "nq_open": [{"question": "the mat. the cat sat on", "answer": [answer]} for answer in ("the mat", "x")],
    "wikitext": [{"page": TEXT}, {"page": "the cat"}],
}


@pytest.fixture
def harness(tmp_path, monkeypatch):
    """The keys that name these tasks."""
    lm_eval = pytest.importorskip("lm_eval", reason="pip install -r requirements-score.txt")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name, documents in HARNESS.items():
        data = str(write_lines(tmp_path / f"{name}.jsonl", documents))
        (file,) = (ROOT / lm_eval.__path__[0] / "tasks").rglob(f"{name}.yaml")
        about = {"include": str(file), "task": f"our_{name}", "dataset_path": "json", "dataset_name": None}
        about["dataset_kwargs"] = {"data_files": dict.fromkeys(("train", "validation", "test"), data)}
        if name == "nq_open":  # the model knows no other words
            about |= {"doc_to_text": "{{question}}", "description": ""}
        (tmp_path / f"our_{name}.yaml").write_text(json.dumps(about))
    group = {"group": "ours", "task": ["our_arc_easy"], "aggregate_metric_list": [{"metric": "acc"}]}
    (tmp_path / "ours.yaml").write_text(json.dumps(group))
    names = ",".join(f"our_{name}" for name in HARNESS if name != "arc_easy")
    return dict(harness=f"{names},ours", include_path=str(tmp_path), num_fewshot=0)


@pytest.mark.filterwarnings("ignore")
def test_tasks_of_lm_eval_harness(cat_run, said, harness):
    """Multiple choice, answers, texts and a group, end to end, on data in a folder; the first and the last as our own
    tasks give them."""
    given = [*(f"{key}={value}" for key, value in harness.items()), "tokens=12", "to=out.jsonl"]
    write_lines("texts.jsonl", [{"text": document["page"]} for document in HARNESS["wikitext"]])
    asked = {"context": f"Question: {ARC['question']}\nAnswer:", "choices": ARC["choices"]["text"]}
    write_lines("exam.jsonl", [{**asked, "answer": answer} for answer in (1, 1, 0)])
    found = values_of(said(cat_run, "exam.jsonl", "texts.jsonl", *given))
    for metric in ("acc", "acc_norm"):
        assert found["our_arc_easy", metric] == found["exam.jsonl", metric]
    assert found["ours", "acc"] == found["our_arc_easy", "acc"]
    assert found["our_hellaswag", "acc"] == 0.5
    assert found["our_nq_open", "exact_match,remove_whitespace"] == 0.5
    assert found["our_wikitext", "bits_per_byte"] == found["texts.jsonl", "bits_per_byte"]
    kept = [json.loads(line)["task"] for line in Path("out.jsonl").read_text().splitlines()]
    asked = {f"our_{name}" for name in HARNESS for _ in HARNESS[name]}
    assert kept[:5] == ["exam.jsonl"] * 3 + ["texts.jsonl"] * 2 and set(kept[5:]) == asked and len(kept) == 14
    refused = said(cat_run, "harness=our_arc", "include_path=.", status=1)
    assert says("harness: … no task our_arc; the nearest is our_arc_easy", refused)
    refused = said(cat_run, "harness=ours,our_arc_easy", "include_path=.", status=1)
    assert says("harness: our_arc_easy is asked for twice, by its name or in a group: leave one out", refused)


@pytest.mark.filterwarnings("ignore")
def test_a_run_scores_tasks_of_lm_eval_harness(cat_run, said, harness, pool):
    """While it trains, as its checkpoint on the command line, with a file beside; each validation again. Standard
    errors, some of which would fork the run, are then not computed."""
    source = huggingface.open_weights(cat_run, pool)
    keys = Harness(**harness, limit=2)
    with on_mesh(2, 1), mock.patch("lm_eval.api.metrics.mean_stderr", side_effect=AssertionError):
        weights, _ = weights_of(source, pool)
        config = in_training(source, eval=keys)
        scorer = tasks.InRun(config, kept_tokenizer(cat_run), lambda trained: trained, 0, Judge(keys, "eval.harness"))
        (found, _), again = scorer(weights), scorer(weights)
    arguments = [*(f"{key}={value}" for key, value in harness.items()), "limit=2", "length=32", "tokens=16"]
    assert found == again[0] and sorted(found) == sorted(scorer.metrics)
    assert as_printed(found) == values_of(said(cat_run, *arguments))


@pytest.mark.filterwarnings("ignore")
def test_a_task_with_beams_and_a_repetition_penalty_is_refused(cat_run, said, harness, tmp_path):
    """Beam search would answer its questions without the penalty."""
    file = tmp_path / "our_nq_open.yaml"
    how = {"until": ["\n"], "num_beams": 2, "repetition_penalty": 1.5}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"generation_kwargs": how}))
    refused = said(cat_run, "harness=our_nq_open", f"include_path={tmp_path}", "tokens=12", status=1)
    assert says("generation_kwargs: repetition_penalty = 1.5: beam search … expected 1, or beams = 1", refused)
