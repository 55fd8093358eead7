"""ledger.html is one well-formed page that loads nothing and says what the ledger says."""

import collections
import dataclasses
import html.parser
import re

import pytest
from ledgers import ledger_of

from ledger.machines.hardware import Hardware, named
from ledger.machines.roofline import roofline
from ledger.pages import contents
from ledger.pages.html import TABLES, coloured, details, page
from ledger.pages.lines import all_lines
from ledger.pages.lines import sums as lines_of
from ledger.pages.table import shown
from ledger.units import number

VOID = {"meta", "br", "img", "input", "link", "hr"}
CASES = [
    ("local_test_synthetic", ()),
    ("c4_a100x8_1b", ()),
    ("c4_a100x8_1b", ("mesh.d=32", "mesh.t=8")),
    ("local_test_synthetic", ("mesh.d=1", "mesh.t=1")),
]
cases = pytest.mark.parametrize("name, overrides", CASES)
MACHINES = {
    "unknown": None, "h200": named("h200"), "tpu_v5e": named("tpu_v5e"),
    "no links": Hardware(312e12, 80 * 2**30, 1935e9), "no figures": Hardware(None, None, None),
    "too small": dataclasses.replace(named("h200"), hbm_bytes=10**8),
}  # fmt: skip


class Parser(html.parser.HTMLParser):
    """Holds that every tag is closed, in order; gathers attributes, ids, and each line's numbers and bars."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.attributes, self.ids, self.texts = [], [], [], collections.defaultdict(str)
        self.bars = collections.defaultdict(dict)  # from the line's id and the column's number to widths by class
        self.line, self.column = "", 0
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.attributes += [(tag, name, value) for name, value in attributes.items()]
        self.ids += [attributes["id"]] if "id" in attributes else []
        if "line" in (attributes.get("class") or "").split():
            self.line, self.column = attributes.get("id", "head"), 0
        self.column += attributes.get("class") == "cost"
        if tag == "i" and self.open[-1] == ("span", "bar") and self.line:
            self.bars[self.line, self.column][attributes["class"]] = float(attributes["style"][6:-1])
        if tag not in VOID:
            self.open.append((tag, attributes.get("class")))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1][0] == tag, (tag, self.open, self.getpos())
        self.open.pop()

    def handle_data(self, data):
        tags = [tag for tag, _ in self.open]
        inside = {kind for _, kind in self.open}
        if "script" in tags or "style" in tags:
            self.texts[tags[-1], dict(enumerate(tags)).get(0)] += data
        elif "cost" in inside and "b" in tags and "word" not in inside:
            self.texts[self.line, self.column] += data
        elif tags[-1:] == ["code"] or tags[-2:] == ["code", "span"]:
            self.texts[self.line, "code"] += data if "rows" not in inside else ""


def by_line(ledger):
    """The ledger's sums, by line, column and colour, from the rows."""
    sums = collections.defaultdict(collections.Counter)
    data = ledger.to_json()
    for row in data["products"]:
        sums[row["line"], 1][row["phase"]] += row["flops"] * row["times"]
    for row in data["collectives"]:
        sums[row["line"], 2][" × ".join(row["axes"])] += row["sent_bytes"] * row["times"]
    for row in data["saved"]:
        sums[row["line"], 3][row["why"]] += row["bytes"] * row["times"]
    return sums


@cases
def test_a_page(name, overrides):
    """The page is well-formed and small, has each id once, and each link leads to one of them; the first screen shows
    the ledger's four totals."""
    ledger = ledger_of(name, *overrides)
    text = page(ledger)
    parser = Parser(text)
    assert len(parser.ids) == len(set(parser.ids))
    links = {value for tag, attribute, value in parser.attributes if (tag, attribute) == ("a", "href")}
    assert links and all(link[0] == "#" and link[1:] in parser.ids for link in links)
    assert len(text.encode()) < 500_000
    assert "How long a step takes is not said: the hardware is not known." in text and "n/a" not in text
    assert f"{ledger.parameters:,} parameters" in text and f"{ledger.tokens:,} (" in text
    assert f"d={ledger.mesh['d']}" in text and "What a training step costs" in text
    kept = sum(row.bytes * row.times for row in ledger.saved)
    sizes = [shown(value, "B") for value in (ledger.sent_bytes(), kept, ledger.memory.bytes)]
    assert re.findall(r'<b class="big">(.*?)</b>', text) == [shown(ledger.costs.flops(), "FLOP"), *sizes]
    folds = re.findall(r"⋮ lines (\d+) to (\d+) cost nothing", text)
    assert folds and all(int(last) - int(first) >= 3 for first, last in folds)
    for column in (2, 3):
        of_lines = {line: sum(parts.values()) for (line, other), parts in by_line(ledger).items() if other == column}
        named = max(of_lines, key=of_lines.get, default="")
        assert (f'Most at <a href="#{named}">' in text) == bool(named)


@cases
def test_the_sums_of_each_line_are_the_ledgers(name, overrides):
    """The margin has the ledger's sums; the bars' widths by phase, axes and reason are parts of the largest line's
    sum."""
    ledger = ledger_of(name, *overrides)
    parser, sums = Parser(page(ledger)), by_line(ledger)
    margin = {key: text for key, text in parser.texts.items() if key[1] in (1, 2, 3)}
    assert set(margin) == {(line or "unknown", column) for line, column in sums}
    order = sorted({row.axes for row in ledger.costs.collectives}, key=lambda axes: (len(axes), axes))
    classes = {" × ".join(axes): f"axes{place}" for place, axes in enumerate(order)} | {"": "unasked"}
    classes |= {why: why for why in ("input", "gradient")}
    for (line, column), parts in sums.items():
        unit, key = "FLOP" if column == 1 else "B", (line or "unknown", column)
        assert margin[key].strip() == shown(sum(parts.values()), unit)
        largest = max(sum(terms.values()) for (_, other), terms in sums.items() if other == column)
        widths = collections.Counter()
        for part, value in parts.items():
            widths[classes.get(part, part) if column != 3 or part in classes else "asked"] += 100 * value / largest
        assert parser.bars[key] == pytest.approx(dict(widths), rel=0.006)


def test_what_is_sent_and_kept():
    """The tables of transfers and of kept values have the ledger's numbers, summed over rows that look alike."""
    ledger = ledger_of("c4_a100x8_1b", "mesh.d=32", "mesh.t=8")
    times, together = collections.Counter(), collections.Counter()
    for row in ledger.to_json()["collectives"]:
        key = row["kind"], " × ".join(row["axes"]), row["dtype"], row["phase"]
        times[key] += row["times"]
        together[key] += row["sent_bytes"] * row["times"]
    assert contents.sent(ledger).rows == [(*key, times[key], together[key]) for key in sorted(times)]
    sizes = [row[0] for row in contents.kept(ledger).rows]
    assert sizes == sorted((row.bytes * row.times for row in ledger.saved), reverse=True)[: len(sizes)] and sizes[0] > 0
    sums = {key: sum(parts.values()) for key, parts in by_line(ledger).items()}
    columns = {caption: number for number, caption in enumerate(TABLES, 1)}
    for line, tables in details(ledger, all_lines(lines_of(ledger))).items():
        for table in tables:
            column = columns[table.caption.partition(",")[0]]
            whole = sum(size for (_, other), size in sums.items() if other == column)
            sizes, shares = [[row[place] for row in table.rows] for place in (-2, -1)]
            assert sum(sizes) == sums[line, column] and sizes == sorted(sizes, reverse=True)
            assert shares == pytest.approx([size / whole for size in sizes])


def test_the_source_is_text():
    """Every line of the file stands in the page; tags in it, and the end of a script, are text there."""
    ledger = ledger_of("local_test_synthetic")
    lines = list(ledger.texts["train.py"])
    lines[0] = '"""</script><script>alert(1)</script> <!-- & &amp; <b>'
    ledger = dataclasses.replace(ledger, texts={"a<b>&.py": lines}, source="a<b>&.py")
    text = page(ledger)
    parser = Parser(text)
    assert [parser.texts[f"a<b>&.py:{number}", "code"] for number in range(1, len(lines) + 1)] == [
        line.strip(" ") for line in lines
    ]
    assert text.count("<script") == 1 and text.count("</script>") == 1 and "<!--" not in text
    assert "<title>a&lt;b&gt;&amp;.py: what a training step costs</title>" in text


def test_coloured_source():
    """Comments, docstrings, strings and keywords have spans, over several lines too; blanks in front are the page's."""
    lines = ['"""One', 'two."""', "def f(x):  # <c>", "    return g(", "        'B/d L', x)"]
    assert coloured(tuple(lines)) == [
        '<span class="c">"""One</span>',
        '<span class="c">two."""</span>',
        '<span class="k">def</span> f(x):  <span class="c"># &lt;c&gt;</span>',
        '<span class="k">return</span> g(',
        "<span class=\"s\">'B/d L'</span>, x)",
    ]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_page_for_a_machine(machine):
    """Its times, its bound and its figures; what is not known is n/a. It says so if the step does not fit. No
    attribute, style or script of the page names an address; it has no frame, image, font or request."""
    ledger = ledger_of("c4_a100x8_1b", "mesh.d=32", "mesh.t=8")
    estimate = MACHINES[machine] and roofline(ledger, MACHINES[machine], 8)
    text = page(ledger, estimate)
    assert ("<svg" in text) == (machine not in ("unknown", "no figures"))
    if machine in ("no links", "no figures"):
        assert "n/a" in text and "How long a step takes on this hardware is not said" in text
    if machine in ("h200", "tpu_v5e"):
        assert f"<b>{shown(estimate.step_s, 's')}</b>" in text and f"<b>{shown(estimate.mfu, 'percent')}</b>" in text
        assert shown(estimate.hardware.peak_flops_per_s, "FLOP/s") in text and "n/a" not in text
    if machine == "h200":
        assert text.count('class="point ') == 6 and "On NVIDIA H200 " in text
        assert "over d: 50.0\N{NO-BREAK SPACE}GB/s" in text
        assert re.search(r" runs \((forward|backward)\)\.\sA device has ", text)
    assert text.count("<b>It will not fit.</b>") == (2 if machine == "too small" else 0)  # first screen, and memory

    parser = Parser(text)
    assert not {tag for tag, _, _ in parser.attributes} & {"link", "img", "iframe", "object", "embed", "base", "form"}
    assert not {name for _, name, _ in parser.attributes} & {"src", "srcset", "action", "data", "xlink:href"}
    code = "".join(re.findall(r"<style>.*?</style>|<script>.*?</script>", text, re.DOTALL))
    assert not re.search(r"https?:|//\w+\.|@import|url\(|fetch|XMLHttp|WebSocket|import\(|@font-face", code)


@pytest.mark.parametrize("kind, values", [
    ("B", {0: "0 B", 7: "7 B", 999.9: "1.00 kB", 4096: "4.10 kB", 2.15e9: "2.15 GB"}),
    ("s", {None: "n/a", 0: "0 s", 4e-11: "under 1 µs", 4.2e-5: "42.0 µs", 0.114: "114 ms", 1: "1.00 s"}),
    ("percent", {None: "n/a", 0: "0.0%", 0.0004: "< 0.1%", 0.5: "50.0%"}),
    ("count", {1234: "1,234"}),
])  # fmt: skip
def test_numbers(kind, values):
    """Amounts, times and parts for people, which a browser breaks nowhere."""
    assert {value: shown(value, kind).replace("\N{NO-BREAK SPACE}", " ") for value in values} == values
    assert not any(" " in shown(value, kind) for value in values) and number(0) == ""
