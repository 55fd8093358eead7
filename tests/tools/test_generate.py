"""python -m tools.generate: what it writes of runs and of published folders, and what it refuses."""

import io
import json
import random
import shutil
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from pages import ROOT
from parts import says
from published import FOLDER
from several_hosts import where

import train
import train_any
from models import layers
from models.decoding import Drawn
from models.mesh import Mesh
from runtime import program
from runtime.data.tokenizers import Tokenizer
from shardlib.mesh import make_mesh
from tools import convert, embed, generate, plan, plan_generate, ready, score

pytestmark = pytest.mark.usefixtures("proved_elsewhere")  # tests/models/test_decoding.py does
SENTENCE = "the cat sat on the mat. "
READY_MODEL, OPEN_WEIGHTS = ready.ready_model, ready.open_weights


MODELS = {}


def served_before(config):
    """Stands in for `ready_model`; it keeps each model, since compiling its programs is most of what a start takes."""
    key = config.model, str(config.mesh), config.compute_dtype, config.weights
    if key not in MODELS:
        MODELS[key] = READY_MODEL(config), train.act.dtype
    model, train.act.dtype = MODELS[key]
    layers.stored.dtype = train.act.dtype
    return model


@pytest.fixture
def said(called, monkeypatch):
    """What `python -m tools.generate <arguments>` prints, or says of an error; `note` is what else it says."""
    monkeypatch.setattr(generate, "ready_model", served_before)

    def call(*arguments, status=0):
        found, out, call.note = called(generate.main, generate.Generate, *arguments)
        assert found == status
        return call.note if status else out

    return call


def test_it_goes_on_with_what_it_has_learnt(cat_run, said):
    """A model that has seen one sentence goes on with it at temperature 0; the prompt comes first."""
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


def test_a_file_of_prompts_is_continued_where_it_was_left(cat_run, said, monkeypatch, tmp_path):
    """Each prompt and sample has a line; a run killed in the middle of a line is continued with the same texts.
    A line says how many were there already. Texts of other prompts, another model or other settings stay alone."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    texts = "the cat", "on the mat", "sat\u2028"  # a line separator, which ends no line
    prompts.write_text("".join(json.dumps({"q": text}, ensure_ascii=False) + "\n" for text in texts))
    given = [cat_run, f"input={prompts}", "prompt_field=q", f"to={out}", "tokens=8", "samples=2", "rows=4"]
    others = ["stop=[x]", "top_k=3", "rows=2", "mesh.d=2"]  # the last two change no text
    said(*given)
    whole = out.read_text()
    assert "there already" not in said.note
    records = list(map(json.loads, whole.splitlines()))
    assert [(record["prompt_number"], record["sample"]) for record in records] == [
        (n, s) for n in range(3) for s in range(2)
    ]
    out.write_text("".join(whole.splitlines(keepends=True)[:3]) + '{"prompt_num')
    said(*given)
    assert out.read_text() == whole and says(f"to={out}: 3 of 6 texts are there already", said.note)
    assert said(*given) == "" and says(f"to={out}: 6 of 6 texts are there already", said.note)
    assert out.read_text() == whole
    said(*given, "samples=1")
    assert says(f"to={out}: 3 of 3 texts are there already", said.note)
    alone = said(cat_run, "prompt=on the mat", "tokens=8", "seed=1", "output=ids")
    assert list(map(int, alone.split())) == records[3]["ids"]
    with monkeypatch.context() as patch:
        patch.setattr(generate, "fingerprint", lambda *_: "0123456789abcdef")
        assert f"to={out} has texts of another model, stop, top_k: give" in said(*given, *others, status=1)
    prompts.write_text('{"q": "the dog"}\n')
    assert f"to={out} has texts of other prompts: " in said(*given, status=1)
    assert out.read_text() == whole


@pytest.mark.parametrize("text", ["a letter", '{"q": 1}', '{"q": 1}\n', "[1]\n{", "3\n", "\xff\n"])
def test_another_file_is_not_written_to(cat_run, said, tmp_path, text):
    """What is no file of texts stays as it is, also where its last line ends in none."""
    (tmp_path / "mine").write_text(text)
    refused = said(cat_run, "prompt=a", f"to={tmp_path}/mine", status=1)
    assert says(f"to={tmp_path}/mine has lines … give another file", refused)
    assert (tmp_path / "mine").read_text() == text
    assert f"to={tmp_path} cannot be written: NotPlain: " in said("nowhere", f"to={tmp_path}", status=1)


def test_ids_and_log_probabilities(said):
    """output=ids prints the new tokens' ids alone; jsonl also what the model says of each."""
    given = [FOLDER / "llama", "prompt_ids=[3,4,5]", "tokens=6", "temperature=0"]
    ids = list(map(int, said(*given, "output=ids").split()))
    record = json.loads(said(*given, "output=jsonl"))
    assert record["ids"] == ids and len(ids) == 6 and all(log_prob < 0 for log_prob in record["log_probs"])
    rounded = json.loads(said(*given, "output=jsonl", "weights=int8"))["log_probs"]
    assert 0 < abs(rounded[0] - record["log_probs"][0]) < 0.1


def test_no_expert_drops_a_token(said, monkeypatch):
    """A capacity is for training: with one, tokens and their log probabilities are those of a model without."""

    def limited(path, pool):
        source = OPEN_WEIGHTS(path, pool)
        return replace(source, model=replace(source.model, capacity=0.5))

    monkeypatch.setattr(generate, "ready_model", READY_MODEL)
    given = [FOLDER / "mixtral", f"prompt_ids={[*range(3, 23)]}", "tokens=6", "temperature=0", "output=jsonl"]
    expected = said(*given)
    monkeypatch.setattr(ready, "open_weights", limited)
    assert said(*given) == expected


def test_an_encoder_reads_the_prompt(said):
    """T5's encoder reads the prompt, and its decoder writes the text."""
    prompt = "prompt_ids=[5,36,30,28,30,16,34,12,21,26,27,36,18,28,19,18,16]"
    ids = said(FOLDER / "t5_gated", prompt, "tokens=8", "temperature=0", "output=ids")
    (expected,) = [text["greedy"] for text in json.loads((FOLDER / "t5_gated/texts.json").read_text())[1:2]]
    assert list(map(int, ids.split())) == expected[:8]


CHATML = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"


def bytes_of(text):
    """The ids of cat_run's tokenizer, bos_id first."""
    return [0, *(byte + 1 for byte in text.encode())]


def test_a_chat_from_the_command_line(cat_run, said, monkeypatch, tmp_path):
    """chat=true, a line of messages, and a conversation through standard input make the same prompts: in the
    tokenizer's template, or else in ChatML, which a line says."""
    given = [cat_run, "temperature=0", "tokens=6", "output=jsonl"]
    first = json.loads(said(*given, "chat=true", "prompt=the cat"))
    assert f"note: {cat_run}: the chat is written as ChatML" in " ".join(said.note.split())
    assert first["prompt_ids"] == bytes_of(CHATML)
    messages = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": first["text"]}]
    messages.append({"role": "user", "content": "on"})
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    second = json.loads(said(*given, f"input={tmp_path}/chats.jsonl", "prompt_field=messages"))
    (tmp_path / "wrong.jsonl").write_text('{"messages": [{"role": "user"}]}\n')
    refused = said(*given, f"input={tmp_path}/wrong.jsonl", "prompt_field=messages", status=1)
    assert f"{tmp_path}/wrong.jsonl, line 1: expected messages, a list of" in refused
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\non\n"))
    assert said(cat_run, "temperature=0", "tokens=6", "chat=true") == f"> {first['text']}\n> {second['text']}\n> \n"
    kept = ready.kept_tokenizer
    template = "{% for each in messages %}{{ each.content }}!{% endfor %}"
    monkeypatch.setattr(ready, "kept_tokenizer", lambda folder: replace(kept(folder), chat_template=template))
    mesh = make_mesh(vars(Mesh()))
    with jax.set_mesh(mesh):
        model = READY_MODEL(ready.OnDevices(model=str(cat_run)))
    assert model.ids_of(messages[:1]) == bytes_of("the cat!") and not model.is_chatml


def test_a_conversation_beyond_learned_positions_is_refused(cat_run, said, monkeypatch):
    """A message is checked as a prompt is, before an answer is drawn."""
    monkeypatch.setattr(generate, "learned_positions", lambda model: 32)
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n"))
    refused = said(cat_run, "chat=true", "tokens=40", status=1)
    longest = len(bytes_of(CHATML)) + 40
    assert says(f"up to {longest} tokens, … trained on 32, … no more positions: lower tokens", refused)


def test_a_template_that_refuses_a_message_ends_a_conversation(cat_run, said, monkeypatch):
    """One line with what the template says."""
    tokenizer = replace(ready.kept_tokenizer(cat_run), chat_template="{{ raise_exception('no users here') }}")
    monkeypatch.setattr(generate, "ready_model", lambda config: replace(served_before(config), tokenizer=tokenizer))
    monkeypatch.setattr(sys, "stdin", io.StringIO("the cat\n"))
    refused = said(cat_run, "chat=true", status=1)
    assert says("error: the chat template does not take the messages … no users here", refused)
    assert refused.count("\n") == 1


def test_an_answer_in_chatml_ends_with_its_turn(cat_run):
    """A tokenizer that has no token for <|im_end|> writes it in several: the text ends before it."""
    tokenizer = replace(ready.kept_tokenizer(cat_run), chat_template=ready.CHATML)
    model = ready.ReadyModel(SimpleNamespace(ends=[]), None, tokenizer, (0,), (), 32)
    text = ready.Text(model, model.chat_stops(["x"]))
    shown = [text.add(Drawn([byte + 1], [0.0])) for byte in b"on the mat<|im_end|>\n"]
    assert "".join(shown) == "on the mat" and text.has_ended


@pytest.mark.parametrize("size", [1, 4, 30])
def test_a_stop_within_another(cat_run, size):
    """The first stop that is whole ends the text, in bursts of any size."""
    tokenizer = ready.kept_tokenizer(cat_run)
    model = ready.ReadyModel(SimpleNamespace(ends=[], start=None), None, tokenizer, (0,), (), 32)
    text, ids = ready.Text(model, ["\nUser:", "User"]), bytes_of("the mat\nUser: the cat")[1:]
    shown = [text.add(Drawn(ids[n : n + size], [0.0] * size)) for n in range(0, len(ids), size)]
    assert "".join(shown) == text.shown == "the mat\n" and len(text.ids) == len("the mat\nUser")


@pytest.mark.parametrize("is_newer", [True, False])
def test_a_text_goes_on_behind_its_prompt(is_newer):
    """Both of SentencePiece's decoders take the space from a text's beginning: not from that of a continuation."""
    tokenizers = pytest.importorskip("tokenizers")
    decoders = tokenizers.decoders
    words = tokenizers.models.WordLevel({"<s>": 0, "\u2581the": 1, "\u2581cat": 2, "s": 3}, "<s>")
    backend = tokenizers.Tokenizer(words)
    spaces = [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Metaspace() if is_newer else decoders.Sequence(spaces)
    tokenizer = Tokenizer(name="words", bos_id=0, json=backend.to_str())
    model = ready.ReadyModel(SimpleNamespace(ends=[], start=None), None, tokenizer, (0,), (), 32)
    assert [ready.Text(model, (), prompt).text([2, 3]) for prompt in ([0, 1], [0], ())] == [" cats", "cats", "cats"]


@pytest.mark.parametrize("arguments, message", [
    (["prompt_ids=[3,99]"], "has the ids [99]: expected … from 0 to 39"),
    (["prompt_ids=[]"], "has the ids []: expected one or more"),
    (["prompt=a", "prompt_ids=[1]"], "prompt and prompt_ids: expected one of them"),
    (["prompt=a"], "golden/llama has no tokenizer … generate takes prompt_ids"),
    (["prompt_ids=[1]", "beams=2", "samples=2"], "samples and beams: … expected one of them"),
    (["prompt_ids=[1]", "beams=2", "repetition_penalty=2"], "repetition_penalty = 2: beam search … expected 1, or"),
    (["prompt_ids=[1]", "beams=2", "temperature=0"], "temperature: beam search draws nothing: leave it out, or beams"),
    (["prompt_ids=[1]", "beams=2", "seed=1"], "seed: beam search draws nothing: leave it out"),
    (["prompt_ids=[1]", "top_p=2"], "top_p = 2: expected … from 0 to 1"),
    (["chat=true", "to=x"], "to: a conversation … Give prompt or input"),
    (["chat=true", "samples=2"], "samples: a conversation … Give prompt or input"),
    (["prompt_ids=[1]", "stop=['']"], "stop[0] = \"\": expected text, not empty"),
    (["input=nowhere.txt"], "input=nowhere.txt cannot be read: "),
    (["prompt_ids=[1]", "tokens=2147483647"], "1 rows of 2147483776 tokens take 550 GB, and"),
])  # fmt: skip
def test_what_is_refused(said, arguments, message):
    """One line that names the key."""
    assert says(message, said(FOLDER / "llama", *arguments, status=1))


@pytest.mark.slow
def test_a_run_of_another_program_is_refused(cat_run, called, monkeypatch, tmp_path):
    """All programs that take weights refuse a run with another forward pass; a key says that it is the same model. The
    checkpoint's copy of the program is never run."""
    monkeypatch.setattr(generate, "ready_model", READY_MODEL)
    monkeypatch.setattr(score, "ready_model", READY_MODEL)
    ran, kept, text = tmp_path / "ran", program._record, tmp_path / "text.txt"
    text.write_text("the cat")

    def changed(attributes):
        source = (ROOT / "train.py").read_text().replace("jax.nn.silu(gate)", "jax.nn.gelu(gate)")
        other = {"source": f"open({str(ran)!r}, 'w')\n{source}"}
        return kept(attributes) | other if "config" in attributes else kept(attributes)

    monkeypatch.setattr(program, "_record", changed)
    refused = "that run and models/ differ (forward, open("
    programs = [
        (generate.main, generate.Generate, [cat_run, "prompt=the c", "tokens=2", "temperature=0"]),
        (score.main, score.Score, [cat_run, text]),
        (convert.main, convert.Convert, [cat_run, tmp_path / "published"]),
        (embed.main, embed.Embed, [cat_run, text, f"to={tmp_path}/vectors.npy"]),
        (plan.main, plan_generate.PlanGenerate, ["program=generate", f"model={cat_run}"]),
    ]
    for main, config, arguments in programs:
        status, _, error = called(main, config, *arguments)
        assert status == 1 and refused in error and "add allow_program_change=true" in error, main
        assert called(main, config, *arguments, "allow_program_change=true")[0] == 0
    data = f"flat_tokens.filespec={cat_run.parent}/text.zarr"
    for trainer, at_hand in ((train, "train.py here"), (train_any, "models/")):
        keys = [*where(tmp_path / trainer.__name__), data, f"initial_weights={cat_run}", "training.steps=1", *OF_CAT]
        keys += ["--config-name=finetune_smollm2"] if trainer is train_any else OF_CAT_MODEL
        status, _, error = called(trainer.main, trainer.Config, *keys)
        assert status == 1 and f"and {at_hand} differ (forward, open(" in error and "allow_config" in error
        assert called(trainer.main, trainer.Config, *keys, "allow_config_change=true")[0] == 0
    assert not ran.exists()


OF_CAT = """mesh.d=1 mesh.t=1 model.compute_dtype=float32 training.tokens.batch=8 training.tokens.len=32
    validation_batches=1""".split()
OF_CAT_MODEL = """model.d_model=32 model.n_q_per_kv=1 model.n_kv=2 model.d_head=16 model.layers=1 model.d_ff=64
    model.vocab=257 --config-name=local_shakespeare""".split()


@pytest.mark.parametrize("prompt, ids", [("", [0]), ([{"role": "user", "content": ""}], None), ([5, 6], [5, 6])])
def test_there_is_always_a_first_token(cat_run, prompt, ids):
    """An empty prompt, or a chat of which the template writes nothing, begins with bos, although the tokenizer puts
    nothing first."""
    template = "{% if messages[0].content %}x{% endif %}"
    tokenizer = replace(ready.kept_tokenizer(cat_run), chat_template=template)
    source = SimpleNamespace(model=SimpleNamespace(vocab=257))
    assert ready.ReadyModel(None, source, tokenizer, (), (), 32).ids_of(prompt) == (ids or [0])


@pytest.mark.parametrize("prompt", ["a\ud800", [{"role": "user", "content": "\udfff"}]])
def test_half_of_a_surrogate_pair(cat_run, said, prompt, tmp_path):
    """JSON may say it, UTF-8 does not: the line of the file is named."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n' + json.dumps({"prompt": prompt}) + "\n")
    text = said(cat_run, f"input={tmp_path}/prompts.jsonl", status=1)
    assert says("prompts.jsonl, line 2: character … half of a surrogate pair, expected Unicode text", text)
    assert "command line: expected Unicode text: " in said(cat_run, "prompt=a\udcff", status=1)


PUBLISHED = {"max_position_embeddings": "the length of a row (max_position_embeddings)", "eos_token_id": "eos_token_id"}
NUMBERS = {"max_position_embeddings": "1 to 2147483647", "eos_token_id": "0 to 4294967295"}


@pytest.mark.parametrize("value", ["x", -1, 1.5, True, {}, [[]], ["a"], 10**30, "\ud800"])
@pytest.mark.parametrize("file, key", [
    ("config.json", "max_position_embeddings"), ("config.json", "eos_token_id"),
    ("generation_config.json", "eos_token_id"),
])  # fmt: skip
def test_a_published_value_of_another_kind(said, tmp_path, monkeypatch, file, key, value):
    """One line that names the key; a value that is none is the same as none."""
    monkeypatch.setattr(generate, "ready_model", READY_MODEL)
    folder = tmp_path / "llama"
    shutil.copytree(FOLDER / "llama", folder)
    content = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(content | {key: value}))
    text = said(folder, "prompt_ids=[3]", "tokens=1", status=1)
    assert says(f"{PUBLISHED[key]} = … : expected … from {NUMBERS[key]}", text) and text.count("\n") == 1


def test_published_values_that_are_none(said, tmp_path, monkeypatch):
    """null is nothing, and an end beyond the vocabulary is never drawn; another is a text's last token."""
    monkeypatch.setattr(generate, "ready_model", READY_MODEL)
    shutil.copytree(FOLDER / "llama", tmp_path / "llama")
    file = tmp_path / "llama/config.json"
    *given, ids = [tmp_path / "llama", "prompt_ids=[3]", "tokens=4", "temperature=0", "output=ids"]
    expected = said(*given, ids)
    changed = json.loads(file.read_text()) | {"max_position_embeddings": None, "eos_token_id": [10**9]}
    file.write_text(json.dumps(changed))
    found = [*map(int, said(*given, ids).split())]
    assert len(found) == 4 >= len(expected.split())
    file.write_text(json.dumps(changed | {"eos_token_id": found[0]}))
    record = json.loads(said(*given, "output=jsonl"))
    assert record["ids"] == found[:1] and record["ended"]


ODD = [
    None, True, -1, 1.5, 10**30, "", "x", "\ud800", [], [1], {}, [[1]], {"a": 1}, [257], [-1], "a" * 5000, "{{ 1//0 }}",
    "{% for m in messages %}{{ m.content }}{% endfor %}", "{{ 'a' * 10**8 }}", [{"role": "user"}],
    [{"role": "user", "content": "a"}], [{"role": "user", "content": "\ud800"}], [{"role": 1, "content": "a"}],
    [{"role": "user", "content": "a", "x": json.loads("[" * 150 + "]" * 150)}],
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_odd_values_in_prompts_and_records(cat_run, called, monkeypatch, tmp_path, seed, record_property):
    """100 of a run's record of its tokenizer, of prompts in a file and of tasks to score: a text, or one line. Another
    exception passes through `called`."""
    rng, counts, run = random.Random(seed), Counter(), tmp_path / "cat"
    shutil.copytree(cat_run, run)
    record, file = run / "tokenizer_record.json", tmp_path / "odd.jsonl"
    content = json.loads(record.read_text())
    monkeypatch.setattr(generate, "ready_model", READY_MODEL)
    for _ in range(100):
        main, kind, what = generate.main, generate.Generate, rng.choice(["record", "prompts", "score"])
        changed = content | {rng.choice([*content, "more"]): rng.choice(ODD)} if what == "record" else content
        record.write_text(json.dumps(changed))
        arguments = ["prompt=a", f"chat={rng.choice(['true', 'false'])}"]
        if what == "prompts":
            file.write_text("".join(json.dumps({"prompt": rng.choice(ODD)}) + "\n" for _ in range(2)))
            arguments = [f"input={file}", *rng.choice([[], ["chat=true"], ["beams=2"], ["samples=2"]])]
        if what == "score":
            main, kind, arguments = score.main, score.Score, [file, "length=64"]
            task = rng.choice(
                [{"text": 0}, {"question": 0, "answer": "b"}, {"context": 0, "choices": ["b"], "answer": 0}]
            )
            file.write_text(json.dumps({key: value or rng.choice(ODD) for key, value in task.items()}) + "\n")
        status, _, error = called(main, kind, run, "tokens=2", *arguments)
        counts[what, status] += 1
        lines = [line for line in error.splitlines() if line.startswith("error: ")]
        assert "Traceback" not in error and len(lines) == status, error
    record_property("summary", f"odd values, seed {seed}: {dict(counts)}")
    assert {status for _, status in counts} == {0, 1}
