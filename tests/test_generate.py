"""python -m generate: what it writes of runs and of published folders, and what it refuses."""

import json
import sys

import pytest
from published import FOLDER

import generate
import train
from runtime.config.command_line import run

SENTENCE = "the cat sat on the mat. "


@pytest.fixture
def said(monkeypatch, capsys):
    """What `python -m generate <arguments>` prints."""

    def call(*arguments, status=0):
        monkeypatch.setattr(sys, "argv", ["generate", *map(str, arguments)])
        if status:
            with pytest.raises(SystemExit) as stop:
                run(generate.main, generate.Generate)
            assert stop.value.code == status
            return capsys.readouterr().err
        run(generate.main, generate.Generate)
        call.note, out = (printed := capsys.readouterr()).err, printed.out
        return out

    return call


def test_it_goes_on_with_what_it_has_learnt(cat_run, said):
    """At temperature 0 a model that has seen one sentence only goes on with it; the prompt comes first."""
    text = said(cat_run, "prompt=on the mat. the c", "tokens=14", "temperature=0")
    assert text == ("on the mat. " + SENTENCE)[: len("on the mat. the c") + 14] + "\n"


def test_beyond_the_length_of_a_row_is_noted(cat_run, said):
    """A model knows no positions that it was not trained on: a line says so."""
    assert len(said(cat_run, "prompt=the", "tokens=40", "output=ids").split()) == 40
    assert "note: up to 44 tokens, of a model that was trained on 32: expect nonsense" in said.note


def test_a_text_ends_before_a_stop(cat_run, said):
    """What stands after `stop` is not shown, although tokens come in bursts."""
    text = said(cat_run, "prompt=the cat sat on the", "tokens=14", "temperature=0", "stop=[cat, zebra]")
    assert text == "the cat sat on the mat. the \n"


def test_a_file_of_prompts_is_continued_where_it_was_left(cat_run, said, tmp_path):
    """A line for each prompt and sample; after a kill in the middle of a line the rest is written, the same texts."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps({"q": text}) + "\n" for text in ("the cat", "on the mat", "sat")))
    given = [cat_run, f"input={prompts}", "prompt_field=q", f"to={out}", "tokens=8", "samples=2", "rows=4"]
    said(*given)
    whole = out.read_text()
    records = list(map(json.loads, whole.splitlines()))
    assert [(each["prompt_number"], each["sample"]) for each in records] == [(n, s) for n in range(3) for s in range(2)]
    out.write_text("".join(whole.splitlines(keepends=True)[:3]) + '{"prompt_num')
    said(*given)
    assert out.read_text() == whole
    alone = said(cat_run, "prompt=on the mat", "tokens=8", "seed=1", "output=ids")
    assert list(map(int, alone.split())) == records[3]["ids"]


def test_ids_and_log_probabilities(said):
    """output=ids prints the new tokens' ids alone; jsonl also what the model says of each."""
    given = [FOLDER / "llama", "prompt_ids=[3,4,5]", "tokens=6", "temperature=0"]
    ids = list(map(int, said(*given, "output=ids").split()))
    record = json.loads(said(*given, "output=jsonl"))
    assert record["ids"] == ids and len(ids) == 6 and all(each < 0 for each in record["log_probs"])


@pytest.mark.parametrize("arguments, message", [
    (["prompt_ids=[3,99]"], "prompt_ids = [3, 99]: expected one id or more, from 0 to 39"),
    (["prompt_ids=[]"], "prompt_ids = []: expected one id or more, from 0 to 39"),
    (["prompt=a", "prompt_ids=[1]"], "prompt and prompt_ids: expected one of them"),
    (["prompt=a"], "golden/llama has no tokenizer: give prompt_ids, and output=ids"),
    (["prompt_ids=[1]", "beams=2", "samples=2"], "samples and beams: beam search finds one text, expected one of them"),
    (["prompt_ids=[1]", "top_p=2"], "top_p = 2: expected a number from 0 to 1"),
    (["input=nowhere.txt"], "input=nowhere.txt cannot be read: "),
])  # fmt: skip
def test_what_is_refused(said, arguments, message):
    """One line that names the key."""
    assert message in said(FOLDER / "llama", *arguments, status=1)


def test_a_run_of_another_program_is_refused(cat_run, said, monkeypatch):
    """Of a train.py that was changed since, it is tried whether it still computes what the family does."""
    monkeypatch.setattr(generate.program, "is_another", lambda *_: True)
    assert said(cat_run, "prompt=the c", "tokens=2", "temperature=0") == "the cat\n"
    right = train.rms_norm
    kept = generate.program.of_checkpoint

    def other(attributes):
        trainer, notes = kept(attributes)
        monkeypatch.setattr(trainer, "rms_norm", lambda x, scale, eps: right(x, 2 * scale, eps))
        return trainer, notes

    monkeypatch.setattr(generate.program, "of_checkpoint", other)
    assert "computes another model than models/llama.py does" in said(cat_run, "prompt=a", status=1)
