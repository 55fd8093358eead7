"""models/reading.py: what encoders predict and what texts are embedded to, against transformers; fill, score, embed."""

import functools
import itertools
import json
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest
import small
from mutation import proofs
from pages import module_of
from published import FOLDER, LENGTHS, READ, SIZES, on_mesh, oracle_of, published_as, weights_of
from safetensors.numpy import load_file
from scipy.special import erf, log_softmax

from models import bert, huggingface, llama, t5
from models.decoding import Generator
from models.reading import Reader
from runtime.terminal import RunError
from tools import embed, generate, ready, score, tasks

MESHES = [*small.slow((1, 1)), (2, 2)]


def reader_of(name, pool, mask=3):
    source = huggingface.open_weights(FOLDER / name, pool)
    return Reader(source.family, source.model, weights_of(source, pool)[0], mask)


def sequences_of(oracle, lengths=LENGTHS):
    """The sequences of the rows whose logits transformers computed: of each where it is in its row, and its place."""
    starts = np.cumsum([0, *lengths])
    return [(row, slice(*place)) for row in range(len(oracle["logits"])) for place in itertools.pairwise(starts)]


def padded(rows, length=20):
    return np.stack([np.pad(row, (0, length - len(row))) for row in rows])


def rows_of(oracle, some):
    """What `Reader` reads of BERT's sequences, each in a padded row of its own."""
    parts = [[oracle[key][row, place] for row, place in some] for key in ("inputs", "targets", "kinds")]
    tokens, targets, kinds = map(padded, parts)
    return [tokens, targets, padded([np.ones(len(ids), int) for ids in parts[0]]), kinds]


# == What is predicted =================================================================================================
@pytest.mark.usefixtures("proved_elsewhere")
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_masked_tokens_have_the_log_probabilities_of_transformers(mesh, pool):
    """Each sequence stands in a padded row of its own: log probabilities agree to 1e-4 nats at all places, and the
    likeliest ids are equal."""
    oracle = oracle_of("bert")
    some = sequences_of(oracle)
    logits = [oracle["logits"][row, place] for row, place in some]
    fields = rows_of(oracle, some)
    with on_mesh(*mesh):
        found, best = reader_of("bert", pool).predict(fields)
    for n, array in enumerate(logits):
        expected = np.take_along_axis(log_softmax(array, axis=-1), fields[1][n, : len(array), None], 1)[:, 0]
        np.testing.assert_allclose(found[n, : len(array)], expected, atol=1e-4, rtol=0)
        assert (best[n, : len(array)] == array.argmax(-1)).all()


@pytest.mark.usefixtures("proved_elsewhere")
@pytest.mark.parametrize("name", [*small.slow("t5"), "t5_gated"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_what_t5_writes_has_the_log_likelihoods_of_transformers(name, mesh, pool):
    """`Scorer` of pairs, of which the first is read: sums to 1e-4 nats, and whether greedy decoding writes them."""
    oracle = oracle_of(name)
    written, read = sequences_of(oracle), sequences_of(oracle, READ)
    pairs = [
        (oracle["read"][row, of_read].tolist(), oracle["targets"][row, place].tolist())
        for (row, place), (_, of_read) in zip(written, read)
    ]
    with on_mesh(*mesh):
        source = huggingface.open_weights(FOLDER / name, pool)
        generator = Generator(source.family, source.model, weights_of(source, pool)[0], start=1)
        scorer = tasks.Scorer(ready.ReadyModel(generator, source, None, (), (), 64), rows=2, length=64)
        found = scorer(pairs)
        best = [oracle["logits"][row, place].argmax(-1) for row, place in written]
        greedy = scorer([(context, ids[:1].tolist()) for (context, _), ids in zip(pairs, best)])
    for (row, place), (_, after), (value, _) in zip(written, pairs, found):
        log_probs = log_softmax(oracle["logits"][row, place], axis=-1)
        assert value == pytest.approx(log_probs[np.arange(len(after)), after].sum(), abs=1e-4)
    assert all(is_greedy for _, is_greedy in greedy) and not any(is_greedy for _, is_greedy in found)


# == Vectors ===========================================================================================================
def head_of_bert(x):
    """Logits of hidden states, from the published tensors alone."""
    w = load_file(FOLDER / "bert/model.safetensors")
    head = {key.removeprefix("cls.predictions."): value for key, value in w.items() if key.startswith("cls.pred")}
    x = x @ head["transform.dense.weight"].T + head["transform.dense.bias"]
    x = x * (1 + erf(x / np.sqrt(2))) / 2
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-3)
    x = x * head["transform.LayerNorm.weight"] + head["transform.LayerNorm.bias"]
    return x @ w["bert.embeddings.word_embeddings.weight"].T + head["bias"]


@pytest.mark.usefixtures("proved_elsewhere")
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_vectors_are_the_hidden_states_of_transformers(mesh, pool):
    """BERT's first and last, by the logits that its head makes of them; a decoder's last of each beginning, by its
    unembedding, and the mean of those is the mean."""
    oracle = oracle_of("bert")
    some = sequences_of(oracle)
    fields = rows_of(oracle, some)
    with on_mesh(*mesh):
        reader = reader_of("bert", pool)
        first, last = reader.embed(fields, "first"), reader.embed(fields, "last")
    for n, (row, place) in enumerate(some):
        np.testing.assert_allclose(head_of_bert(first[n]), oracle["logits"][row, place][0], atol=1e-4, rtol=0)
        np.testing.assert_allclose(head_of_bert(last[n]), oracle["logits"][row, place][-1], atol=1e-4, rtol=0)

    oracle = oracle_of("llama")
    (row, place), *_ = sequences_of(oracle)
    ids = [1, *oracle["targets"][row, place][:-1].tolist()]
    tokens = padded([ids[: n + 1] for n in range(len(ids))] + [ids] * (-len(ids) % 4))
    lengths = [*range(1, len(ids) + 1), *[len(ids)] * (-len(ids) % 4)]
    segment = padded([np.ones(n, int) for n in lengths])
    with on_mesh(*mesh):
        reader = reader_of("llama", pool)
        vectors, means = (reader.embed([tokens, tokens, segment, 0 * tokens], pool) for pool in ("last", "mean"))
    unembed = load_file(FOLDER / "llama/model.safetensors")["lm_head.weight"]
    np.testing.assert_allclose(vectors[: len(ids)] @ unembed.T, oracle["logits"][row, place], atol=1e-4, rtol=0)
    np.testing.assert_allclose(means[len(ids) - 1], vectors[: len(ids)].mean(0), atol=1e-5, rtol=0)


# == The programs ======================================================================================================
@pytest.fixture(scope="module")
def published_bert(tmp_path_factory):
    """The golden BERT with a tokenizer of words, as a published folder has it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(36))]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[PAD]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    around = {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] $B:1 [SEP]:1"}
    backend.post_processor = processors.TemplateProcessing(
        **around, special_tokens=[(word, words.index(word)) for word in ("[CLS]", "[SEP]")]
    )
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)
    return published_as(folder, "bert")


def log_probs_alone(pool, ids, mask_at):
    """All log probabilities at one place of a row that is masked there, on one device."""
    tokens = np.array([ids, ids])
    tokens[:, mask_at] = 3
    with on_mesh(1, 1):
        reader, found = reader_of("bert", pool), []
        for target in range(40):
            log_prob, _ = reader.predict([tokens, np.full_like(tokens, target), 0 * tokens + 1, 0 * tokens])
            found.append(log_prob[0, mask_at])
    return np.array(found)


@pytest.mark.usefixtures("proved_elsewhere")
def test_masked_tokens_are_filled_in(published_bert, called, pool, tmp_path):
    """The likeliest word is printed as text, as ids and as records of a file, on one device and on two; keys of models
    that write are refused."""
    expected = log_probs_alone(pool, [1, 9, 3, 12, 2], 2)
    best, run = int(expected.argmax()), functools.partial(called, generate.main, generate.Generate, published_bert)
    status, out, _ = run("prompt=w5 [MASK] w8")
    filled = ready.load_tokenizer(str(published_bert)).decode([9, best, 12])
    assert (status, out.strip()) == (0, filled)
    assert run("prompt_ids=[1,9,3,12,2]", "output=ids", "mesh.t=2")[1].strip() == str(best)
    (tmp_path / "lines.txt").write_text("w5 [MASK] w8\nw1 [MASK] w2 [MASK] w3\n")
    assert run(f"input={tmp_path}/lines.txt", f"to={tmp_path}/out.jsonl")[0] == 0
    first, second = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert first["ids"] == [best] and first["log_probs"] == pytest.approx([expected[best]], abs=1e-4)
    assert len(second["ids"]) == 2 and "[MASK]" not in second["text"]
    assert "temperature: " in run("prompt=[MASK]", "temperature=0.5")[2]
    assert "fills in masked tokens: expected prompt" in run()[2]
    assert "expected a masked token, the id 3" in run("prompt=w5")[2]


@pytest.mark.usefixtures("proved_elsewhere")
def test_bert_is_scored_by_masking_one_token_after_the_other(published_bert, called, pool, tmp_path):
    """A choice's or text's score is the sum of its tokens' log probabilities, each with all others in place; questions
    are refused."""
    exam, text = tmp_path / "exam.jsonl", tmp_path / "text.txt"
    exam.write_text(json.dumps({"context": "w5", "choices": ["w8 w9", "w1"], "answer": 0}) + "\n")
    text.write_text("w5 w8")
    arguments = published_bert, exam, text, f"to={tmp_path}/out.jsonl"
    status, out, _ = called(score.main, score.Score, *arguments)
    choices, whole = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())

    def expected(ids, places):
        return sum(log_probs_alone(pool, ids, place)[ids[place]] for place in places)

    sums = [expected([1, 9, 12, 13, 2], (2, 3)), expected([1, 9, 5, 2], (2,))]
    assert status == 0 and "bits_per_byte" in out
    assert choices["log_likelihoods"] == pytest.approx(sums, abs=1e-4)
    assert whole["log_likelihood"] == pytest.approx(expected([1, 9, 12, 2], (1, 2)), abs=1e-4) and whole["tokens"] == 2
    exam.write_text(json.dumps({"question": "w5", "answer": "w1"}) + "\n")
    assert "questions are for models that write" in called(score.main, score.Score, published_bert, exam)[2]


@pytest.mark.usefixtures("proved_elsewhere")
def test_vectors_of_a_file(published_bert, called, monkeypatch, pool, tmp_path):
    """The vectors of texts and of a pair are those of `Reader`, on any mesh; an existing file is not overwritten, and
    what is refused leaves none. Each batch is as long as its longest text, rounded up."""
    batches = mock.Mock(side_effect=embed.batch_of)
    monkeypatch.setattr(embed, "batch_of", batches)
    monkeypatch.setattr(embed, "SLOTS", 2)
    lines = tmp_path / "texts.jsonl"
    lines.write_text('{"text": "w5 w8 w9"}\n{"text": ["w5", "w6 w7"]}\n{"text": "w1"}\n')
    run = functools.partial(called, embed.main, embed.Embed, published_bert, lines)
    assert run(f"to={tmp_path}/one.npy", "rows=2")[0] == 0
    assert [call.args[1] for call in batches.mock_calls] == [6, 4]
    assert run(f"to={tmp_path}/two.npy", "mesh.d=2", "mesh.t=2", "is_unit=true")[0] == 0
    found, unit = np.load(tmp_path / "one.npy"), np.load(tmp_path / "two.npy")
    tokens, kinds = np.array([[1, 9, 2, 10, 11, 2]] * 2), np.array([[0, 0, 0, 1, 1, 1]] * 2)
    with on_mesh(1, 1):
        expected = reader_of("bert", pool).embed([tokens, tokens, 0 * tokens + 1, kinds], "mean")
    np.testing.assert_allclose(found[1], expected[0], atol=1e-5, rtol=0)
    np.testing.assert_allclose(unit, found / np.linalg.norm(found, axis=1, keepdims=True), atol=1e-5, rtol=0)
    assert found.shape == (3, 16) and found.dtype == np.float32
    assert "expected a file in .npy" in run(f"to={tmp_path}/one.npy")[2]
    lines.write_text('{"text": 3}\n')
    assert "line 1: expected an object whose field text" in run(f"to={tmp_path}/three.npy")[2]
    lines.write_text(json.dumps({"text": "w5 " * 99}))
    assert "101 tokens, expected 1 to " in run(f"to={tmp_path}/three.npy")[2]
    assert not [*tmp_path.glob("three.npy*")]  # nothing begun


def test_texts_that_have_no_vector():
    """Two where the model knows no pairs, and one that is longer than it reads."""
    source = SimpleNamespace(model=None)
    model = SimpleNamespace(start=(1,), end=(), length=4, source=source, encoded=lambda text: [5] * len(text))
    assert embed.ids_of(model, ["abc"]) == ([1, 5, 5, 5], 4)
    for texts, said in ((["a", "b"], "models that know pairs"), (["abcd"], "'abcd': 5 tokens, expected 1 to 4: ")):
        with pytest.raises(RunError, match=said):
            embed.ids_of(model, texts)


# == The check =========================================================================================================
MODELS = {
    bert: {**SIZES, "positions": 32},
    t5: {**SIZES, "encoder_layers": 2},
    llama: {**SIZES, "n_q_per_kv": 2, "rope_max_timescale": 256},
}


def check_reading(path, source):
    """Checks predictions and vectors of three families on 4 x 2; returns the number of claims."""
    module, proved = module_of(path, source), 0
    row = [jax.ShapeDtypeStruct((16, 32), kind) for kind in (np.uint32, np.uint32, np.int32, np.int32)]
    for family, sizes in MODELS.items():
        model = family.Model(**sizes)
        weights = jax.eval_shape(functools.partial(family.init, model), np.uint32(0))
        rows = module.ReadRows(*row, *(row[1:3] if family is t5 else []))
        reader = module.Reader(family, model, None)
        mesh = jax.sharding.AbstractMesh((2, 2, 1, 1, 2), tuple("rdcet"))
        if family is not llama:
            proved += reader.mapped("predict").check(mesh, weights, rows)
        proved += reader.mapped("embed", pool="mean").check(mesh, weights, rows)
    return proved


FILE, PLACE = "models/reading.py", r"(reading|bert|t5|llama|layers|decoding|weights)\.py"
test_it_is_accepted, test_every_mutant_is_refused = proofs({FILE: (check_reading, 300, 9)}, [FILE], place=PLACE)
