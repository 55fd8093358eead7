"""runtime/data/tokenizers.py: ids and text there and back, what stands before a sequence, chats against transformers,
and what is refused."""

import dataclasses
import json
import resource

import numpy as np
import pytest
import zarr
from parts import assert_refuses

from runtime.data import tokenizers
from runtime.data.apart import Apart, Unfinished
from runtime.data.tokenizers import (
    CHATML,
    EXPECTED,
    ChatError,
    Tokenizer,
    load_dataset_tokenizer,
    load_tokenizer,
    save_dataset_tokenizer,
    train_bpe,
)

TEXTS = ["", "Hi!", "Grüße, 你好 🎉\r\n\ttab  two", "\x00\x7f\u2028", "The quick brown fox. " * 20]
# The assistant's turns are marked by the template itself, or found as what they add to the chat before.
HEADER = "{% for m in messages %}<|{{ m.role }}|>\n"
MARKED = (
    HEADER + "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}\n{% endfor %}"
)
UNMARKED = (
    "{{ bos_token }}"
    + HEADER
    + "{{ m.content | trim }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße! 1 + 1?"},
    {"role": "assistant", "content": "2 – 二 "},
    {"role": "user", "content": "Sure?", "name": None},
    {"role": "assistant", "content": "Yes."},
]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(iter(TEXTS * 3), 290)


@pytest.fixture
def stored(tmp_path, bpe):
    """A folder as transformers saves one, of a tokenizer with holes in its ids."""
    content = json.loads(bpe.json)
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    for id, token in ((1000, "<|begin|>"), (1001, "<|end|>")):
        content["model"]["vocab"][token] = id
        content["added_tokens"].append({"id": id, "content": token, **special})
    folder = tmp_path / "stored"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<|begin|>", **special},
        "eos_token": "<|end|>",
        "pad_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(UNMARKED)
    return folder


# ---------------------------------------------------------------- there and back


def test_bytes():
    """An id is its byte plus 1, and 0 stands before a sequence, or an id that one says, which the vocabulary then
    holds; ids come back as the text that they were."""
    tokenizer = load_tokenizer("bytes_utf8")
    batch = tokenizer.encode_batch(TEXTS)
    for text, ids in zip(TEXTS, batch):
        assert ids.dtype == np.uint32 and ids.tolist() == [byte + 1 for byte in text.encode()]
        assert tokenizer.decode(ids) == text
    assert (tokenizer.vocab, tokenizer.bos_id, tokenizer.name) == (257, 0, "bytes_utf8")
    assert load_tokenizer("bytes_utf8", bos_id=257).vocab == 258
    assert tokenizer.decode([0, 73, 256, 300, 106]) == "H\ufffdi"  # no byte, no byte of UTF-8, no byte


def test_trained_bpe(bpe):
    """A byte-level BPE takes any text and gives it back; the same texts train the same one; it is a tokenizer.json of
    `tokenizers`."""
    import tokenizers

    assert bpe.vocab == 290 and bpe.bos_id == 0
    backend = tokenizers.Tokenizer.from_str(bpe.json)
    unseen = [*TEXTS, "Wörter, die nie vorkamen: ḁ", "<|endoftext|>"]
    for text, ids in zip(unseen, bpe.encode_batch(unseen)):
        assert ids.dtype == np.uint32 and ids.tolist() == backend.encode(text).ids
        assert bpe.decode(ids) == text
    for _ in range(3):
        assert train_bpe(iter(TEXTS * 3), 290).json == bpe.json


def test_loaded_from_files(stored, bpe):
    """A tokenizer.json, or a folder that holds one, is read with what stands beside it; ids may have holes, and
    truncation is off."""
    content = json.loads((stored / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (stored / "tokenizer.json").write_text(json.dumps(content))
    for name in (str(stored), str(stored / "tokenizer.json")):
        tokenizer = load_tokenizer(name)
        assert (tokenizer.name, tokenizer.bos_id, tokenizer.vocab) == (name, 1000, 1002)
        assert tokenizer.chat_template == UNMARKED and tokenizer.special_tokens == {
            "bos_token": "<|begin|>",
            "eos_token": "<|end|>",
        }
        for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS)):
            np.testing.assert_array_equal(ids, bpe.encode_batch([text])[0])
            assert tokenizer.decode(ids) == text
    assert load_tokenizer(str(stored), bos_id=7, chat_template="x").bos_id == 7
    assert tokenizer.decode([1000, 5000, -1, *tokenizer.encode_batch(["Hi"])[0]]) == "<|begin|>Hi"


def test_loaded_by_transformers(tmp_path, stored):
    """A folder without tokenizer.json is converted as transformers does it, to the same ids."""
    import transformers

    folder = tmp_path / "gpt2"
    folder.mkdir()
    model = json.loads((stored / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer, theirs = load_tokenizer(str(folder)), transformers.AutoTokenizer.from_pretrained(folder)
    assert [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)] == [theirs(text)["input_ids"] for text in TEXTS]
    assert tokenizer.bos_id == theirs.bos_token_id == 0


def test_loaded_by_name(tmp_path, stored, monkeypatch, request):
    """A name on the hub is taken from the hub's cache, where it is, without a network; else the reason is said."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(tokenizers, "apart", apart := Apart())  # it reads the environment when it starts
    request.addfinalizer(lambda: (apart.process.kill(), apart.process.wait()))
    repository = tmp_path / "cache" / "models--some--one"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    stored.rename(repository / "snapshots" / "abc")
    assert load_tokenizer("some/one").bos_id == 1000
    (repository / "snapshots" / "abc" / "chat_template.jinja").unlink()
    assert load_tokenizer("some/one").chat_template == ""
    assert_refuses(f"no/where cannot be loaded … {EXPECTED}", load_tokenizer, "no/where")
    assert_refuses(f"no where cannot be loaded … {EXPECTED}", load_tokenizer, "no where")


@pytest.mark.parametrize("settings, post_processor, bos", [
    ({"bos_token": "Hi"}, ["!", "i"], "Hi"),
    ({"eos_token": "Hi"}, ["!", "i"], "!"),
    ({"eos_token": "Hi"}, [], "<|endoftext|>"),
    ({"eos_token": "Hi", "no": "<|endoftext|>"}, [], "Hi"),
])  # fmt: skip
def test_what_stands_before(tmp_path, settings, post_processor, bos):
    """It is the bos token; else what the tokenizer puts first; else <|endoftext|>; else the end token."""
    import tokenizers

    tokens = [token for token in ["!", "i", "Hi", "<|endoftext|>"] if token != settings.get("no")]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({token: id for id, token in enumerate(tokens)}, "!"))
    if post_processor:
        first, last = post_processor
        pairs = [(token, tokens.index(token)) for token in post_processor]
        backend.post_processor = tokenizers.processors.TemplateProcessing(f"{first} $A {last}", special_tokens=pairs)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(str(tmp_path)).bos_id == tokens.index(bos)


# ---------------------------------------------------------------- what is refused


def test_refused(tmp_path):
    """Each tokenizer that cannot be had says why, in a line, and what was expected."""
    path = tmp_path / "tokenizer.json"
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    large = json.dumps({"type": "WordLevel", "vocab": {"a": 0, "b": 2**31}, "unk_token": "a"})
    large = f'{{"version": "1.0", "added_tokens": [], "model": {large}}}'.encode()
    for name, content, bos_id, message in (
        ("./nowhere", b"", None, f"no tokenizer ./nowhere: {EXPECTED}"),
        ("x.json", b"", None, f"no tokenizer x.json: {EXPECTED}"),
        (path, b"{}", None, f"{path} cannot be loaded … {EXPECTED}"),
        (path, b"\xff", None, f"{path} cannot be loaded … {EXPECTED}"),
        (tmp_path / "other.json", b"", None, f"{tmp_path}/other.json cannot be read … {EXPECTED}"),
        (tmp_path / "empty", b"", None, f"{tmp_path}/empty cannot be loaded … {EXPECTED}"),
        (path, large, None, f"{path} names no token … before a text: say bos_id="),
        (path, large, 0, f"{path} has the id 2147483648 … up to 2147483647"),
    ):
        path.write_bytes(content)
        assert_refuses(message, load_tokenizer, str(name), bos_id=bos_id)


GROWS = [{"type": "Replace", "pattern": {"String": old}, "content": 100 * new} for old, new in ("éa", "ab")]
NORMALIZER = {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="}


@pytest.mark.parametrize("changed, message", [
    ({"normalizer": NORMALIZER}, "it ends its process with status -6"),
    ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "PanicException: chunk size must be non-zero"),
    ({"decoder": {"type": "Strip", "content": "a", "start": 3, "stop": 5}}, "PanicException: index out of bounds"),
    ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}}, "Exception: Token `b` out of vocabulary"),
    ({"normalizer": {"type": "Replace", "pattern": {"Regex": "[ab]"}, "content": "x" * 999}}, "ValueError: it makes "),
    ({"normalizer": {"type": "Sequence", "normalizers": GROWS}}, "ValueError: its normalizer may write 10000 "),
])  # fmt: skip
def test_a_tokenizer_that_aborts(tmp_path, bpe, changed, message):
    """The package's Rust ends its process, or panics, or a letter becomes a thousand ids: a message costs no more; of a
    record in a run folder too, whose tokenizer is built when it is used."""
    text = json.dumps(json.loads(bpe.json) | changed)
    (tmp_path / "mine.json").write_text(text)
    assert_refuses(f"{tmp_path}/mine.json cannot be read ({message}", load_tokenizer, f"{tmp_path}/mine.json")
    of_a_run = Tokenizer(name="x", bos_id=0, json=text)
    assert_refuses(f"tokenizer x cannot be read ({message}", of_a_run.encode_batch, ["a"])
    (tmp_path / "mine.json").write_text(bpe.json)
    assert load_tokenizer(f"{tmp_path}/mine.json").vocab == bpe.vocab


def test_a_text_that_a_tokenizer_panics_at(bpe):
    """Other texts are still encoded. A chat's is refused alike."""
    normalizer = {"type": "Replace", "pattern": {"Regex": "(?=x)"}, "content": "ab"}
    tokenizer = dataclasses.replace(bpe, json=json.dumps(json.loads(bpe.json) | {"normalizer": normalizer}))
    template = "{% generation %}{{ messages[0].content }}{% endgeneration %}"
    chats = dataclasses.replace(tokenizer, chat_template=template)
    for encode, texts in (tokenizer.encode_batch, ["x"]), (chats.encode_chat, [{"role": "assistant", "content": "x"}]):
        assert_refuses("bpe_290 does not encode a text … out of bounds", encode, texts)
    assert len(tokenizer.encode_batch(["a"])) == 1


def test_a_tokenizer_without_a_vocabulary(tmp_path):
    """It has no ids, but the one that stands before a text."""
    (tmp_path / "empty.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    tokenizer = load_tokenizer(f"{tmp_path}/empty.json", bos_id=0)
    assert tokenizer.vocab == 1 and [ids.tolist() for ids in tokenizer.encode_batch(["a"])] == [[]]


@pytest.mark.parametrize("field, value", [
    ("name", 3), ("bos_id", "0"), ("bos_id", -1), ("bos_id", True), ("bos_id", None), ("json", []),
    ("chat_template", {}), ("special_tokens", {"eos_token": 3}), ("special_tokens", []), ("special_tokens", None),
])  # fmt: skip
def test_a_record_of_another_kind(field, value):
    """What a run folder or a data set says of its tokenizer has the types that it needs."""
    assert_refuses("has a field of another type", Tokenizer, **{"name": "x", "bos_id": 0, field: value})


def test_a_template_and_its_process():
    """A call that takes too much ends its process, and the next call starts a new one. Limits hold in that process, for
    each call; imports do not count."""
    apart = Apart()
    for _ in range(3):
        apart("build", '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
    assert apart("render", "{{ messages[0].content }}", [{"content": "a"}], {}) == ["a", []]
    first = apart.process
    assert apart("render", "{{ eos_token }}", [], {"eos_token": "b"}) == ["b", []] and apart.process is first
    large, inner = "{{ 'a'.center(10**10) }}", "{{ cycler.__init__.__globals__ }}"
    assert_refuses("it takes too much memory", apart, "render", large, [], {}, error=Unfinished)
    assert apart("render", "c", [], {}) == ["c", []] and apart.process is not first
    first.wait()
    unsafe = "SecurityError: access to attribute '__init__' of 'type' object is unsafe"
    assert_refuses(unsafe, apart, "render", inner, [], {}, error=Unfinished)
    assert resource.getrlimit(resource.RLIMIT_CPU)[0] == resource.RLIM_INFINITY
    last = apart.process
    apart.pipe.close()
    assert last.wait(600) == 0  # as where this process ends


def test_missing_packages(monkeypatch, bpe, stored):
    """A package that is not installed is named, with the command that installs it."""
    for package, call in [
        ("tokenizers", lambda: load_tokenizer(str(stored))),
        ("tokenizers", lambda: train_bpe(TEXTS, 300)),
        ("transformers", lambda: load_tokenizer("some/one")),
        ("jinja2", lambda: load_tokenizer(str(stored)).encode_chat(CHAT)),
    ]:
        with monkeypatch.context() as patch:
            patch.setitem(__import__("sys").modules, package, None)
            assert_refuses(f"needs the package {package} … pip install -r requirements-text.txt", call)


# ---------------------------------------------------------------- within a data set


@pytest.mark.parametrize("url", [False, True])
def test_kept_in_a_data_set(tmp_path, bpe, stored, url):
    """A data set, by folder or URL, gives back the tokenizer that was stored, and None if it has none; a tokenizer that
    was changed or lost, or is larger than any, is refused."""
    path = "memory://kept.zarr" if url else str(tmp_path / "kept.zarr")
    cannot = f"tokenizer of … {path} cannot be read"
    if not url:
        assert_refuses(cannot, load_dataset_tokenizer, path)
    group = zarr.open_group(path, mode="w")
    assert load_dataset_tokenizer(path) is None
    for tokenizer in (load_tokenizer("bytes_utf8"), bpe, load_tokenizer(str(stored))):
        save_dataset_tokenizer(path, tokenizer)
        found = load_dataset_tokenizer(path)
        assert found == tokenizer and found.vocab == tokenizer.vocab
        for ours, theirs in zip(found.encode_batch(TEXTS), tokenizer.encode_batch(TEXTS)):
            np.testing.assert_array_equal(ours, theirs)
    group["tokenizer_json"][3] = 0
    assert_refuses(f"tokenizer_json of {path} … sha256 differs … copy", load_dataset_tokenizer, path)
    if not url:  # 300 bytes of metadata that say eight gigabytes: refused before they are allocated
        file = tmp_path / "kept.zarr/tokenizer_json/zarr.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "shape": [2**33]}))
        assert_refuses("tokenizer_json has 8,589,934,592 bytes, expected at most", load_dataset_tokenizer, path)
    del group["tokenizer_json"]
    assert_refuses(f"{cannot} (KeyError: 'tokenizer_json')", load_dataset_tokenizer, path)


# ---------------------------------------------------------------- chats


def theirs(stored, template, **options):
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(stored / "tokenizer.json"), bos_token="<|begin|>", eos_token="<|end|>"
    )
    return tokenizer.apply_chat_template(CHAT, chat_template=template, return_dict=True, **options)


def test_chat_with_marks_equals_transformers(stored):
    """Ids and targets of a template that marks the assistant's turns are those of transformers, token by token."""
    expected = theirs(stored, MARKED, return_assistant_tokens_mask=True)
    ids, is_target = load_tokenizer(str(stored), chat_template=MARKED).encode_chat(CHAT)
    assert (ids.tolist(), is_target.tolist()) == (expected["input_ids"], expected["assistant_masks"])


@pytest.mark.parametrize("name", ["bytes_utf8", "stored"])
def test_chat_without_marks(stored, name):
    """A template without marks makes targets of exactly what follows an answer's header, the first answer's too; a
    leading bos is dropped."""
    tokenizer = load_tokenizer(name if name == "bytes_utf8" else str(stored), chat_template=UNMARKED)

    def turns_of(chat):
        ids, is_target = tokenizer.encode_chat(chat)
        turns = np.split(np.arange(len(ids)), np.flatnonzero(np.diff(is_target.astype(int))) + 1)
        return ids.tolist(), [(bool(is_target[turn[0]]), tokenizer.decode(ids[turn])) for turn in turns]

    ids, turns = turns_of(CHAT)
    if name == "stored":
        assert theirs(stored, UNMARKED)["input_ids"] == [1000, *ids]
    assert turns == [
        (False, "<|system|>\nBe brief.<|end|>\n<|user|>\nGrüße! 1 + 1?<|end|>\n<|assistant|>\n"),
        (True, "2 – 二<|end|>\n"),
        (False, "<|user|>\nSure?<|end|>\n<|assistant|>\n"),
        (True, "Yes.<|end|>\n"),
    ]
    assert turns_of(CHAT[2:3])[1] == [(False, "<|assistant|>\n"), (True, "2 – 二<|end|>\n")]


FORGETFUL = "{% for m in messages %}<{{ m.role }}>{% if loop.last %}(last){% endif %}{{ m.content }}{% endfor %}"
NO_MESSAGES = 'expected messages, a list of {"role": ..., "content": ...}'


@pytest.mark.parametrize("messages, template, message", [
    ("text", UNMARKED, NO_MESSAGES),
    ([], UNMARKED, NO_MESSAGES),
    ([{"content": "x"}], UNMARKED, NO_MESSAGES),
    ([{"role": "user", "content": None}], UNMARKED, NO_MESSAGES),
    (CHAT[:2], UNMARKED, "no message is the assistant's … nothing to learn"),
    (CHAT, "{{ raise_exception('no') }}", "chat template … messages (TemplateError: no)"),
    (CHAT, FORGETFUL, "chat template … up to message 2 differently … chat_template … with {% generation %}"),
])  # fmt: skip
def test_chats_that_are_refused(messages, template, message):
    """The message says what is no chat, and which template cannot tell whose words are whose."""
    tokenizer = Tokenizer(name="bytes_utf8", bos_id=0, chat_template=template)
    assert_refuses(message, tokenizer.encode_chat, messages, error=ChatError)


CHATML_TEXT = """\
<|im_start|>system
Be brief.<|im_end|>
<|im_start|>user
Grüße! 1 + 1?<|im_end|>
<|im_start|>assistant
2 – 二 <|im_end|>
<|im_start|>user
Sure?<|im_end|>
<|im_start|>assistant
Yes.<|im_end|>
"""


@pytest.mark.parametrize("trained", [True, False])
def test_chatml(bpe, trained):
    """ChatML is written as its authors write it. Each of the assistant's tokens, with the end of its turn, has its
    message's weight, all others have 0; a trained BPE has one id for the end. A prompt ends with the header of an
    answer, and a chat goes on as it was. Half of a surrogate pair, and a template that marks other parts, are refused.
    """
    tokenizer = dataclasses.replace(bpe if trained else load_tokenizer("bytes_utf8"), chat_template=CHATML)
    weights = [1, 1, 0.5, 7, 2]
    ids, weight = tokenizer.encode_chat(CHAT, weights)
    assert tokenizer.decode(ids) == CHATML_TEXT and weight.dtype == np.float32 and set(weight) == {0, 0.5, 2}
    parts = [tokenizer.decode(ids[weight == value]) for value in (0.5, 2)]
    assert parts == ["2 – 二 <|im_end|>", "Yes.<|im_end|>"]
    if trained:
        (end,) = tokenizer.encode_batch(["<|im_end|>"])[0]
        assert weight[ids == end].tolist() == [0, 0, 0.5, 0, 2]
        assert (end, tokenizer.special_tokens["eos_token"]) == (2, "<|im_end|>")
    prompt = tokenizer.encode_prompt(CHAT[:2])
    assert tokenizer.decode(prompt) == CHATML_TEXT.partition("2 – 二")[0]
    assert ids[: len(prompt)].tolist() == prompt.tolist()
    calls = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"name": "f"}]}]
    message = "messages (TemplateError: ChatML has no form for tool_calls)"
    assert_refuses(message, tokenizer.encode_chat, calls, error=ChatError)
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode_chat([{"role": "assistant", "content": "\ud83d"}])
    once = dataclasses.replace(tokenizer, chat_template="{% generation %}{{ messages[2].content }}{% endgeneration %}")
    message = "chat template marks 1 parts … expected one for each"
    assert_refuses(message, once.encode_chat, CHAT, weights, error=ChatError)
