"""Conditions on the fields of rows, against the same conditions in Python. Module:
megaframe.data.preprocessing.row_filters.
"""

import json
import operator

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from preprocess_runs import decode_documents, run
from stream_runs import configure, list_rows, open_loader

from megaframe.data.preprocessing.corpus_files import InputError
from megaframe.data.preprocessing.row_filters import UnjudgedRow, parse_filters

ROWS = [
    {"text": f"row {n}", "lang": ("en", "de", "fr")[n % 3], "score": n / 10, "ok": n % 2 == 0}
    for n in range(30)
]
KEPT = [row["text"] for row in ROWS if row["lang"] == "en" and row["score"] >= 0.5]
WHERE = ("lang=en", "score>=0.5")
COMPARISONS = {
    "=": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


@given(st.sampled_from([*COMPARISONS]), st.integers(-9, 9), st.integers(-9, 9))
def test_numbers_compare_as_numbers(comparison, found, value):
    (condition,) = parse_filters([f"n {comparison} {value}"])
    expected = COMPARISONS[comparison](found, value)
    assert condition.accepts({"n": found}) == condition.accepts({"n": float(found)}) == expected


@pytest.mark.parametrize(
    ("text", "row", "expected"),
    [
        ("lang=en", {"lang": "en"}, True),
        ("lang!=en", {"lang": "en"}, False),
        ("a.b=x", {"a": {"b": "x"}}, True),
        ("a.b=x", {"a.b": "x", "a": {"b": "y"}}, True),
        ("ok=true", {"ok": True}, True),
        ("ok=1", {"ok": True}, False),
        ("none=null", {"none": None}, True),
        ("n=1.0", {"n": 1}, True),
        ("s=1.0", {"s": "1"}, False),
        ("n>=0.5", {"n": "0.75"}, True),
        ("s=", {"s": ""}, True),
        ("q=a=b", {"q": "a=b"}, True),
    ],
)
def test_fields_are_found_and_compared(text, row, expected):
    (condition,) = parse_filters([text])
    assert condition.accepts(row) is expected


@pytest.mark.parametrize(
    "row", [{}, {"a": 1}, {"a": {"c": 1}}, {"a": {"b": "x"}}, {"a": {"b": True}}]
)
def test_rows_without_the_field_or_a_number_are_not_judged(row):
    (condition,) = parse_filters(["a.b>1"])
    with pytest.raises(UnjudgedRow, match=r"a\.b"):
        condition.accepts(row)


@pytest.mark.parametrize("text", ["", "lang", "=en", "a>b", "a>=", "a==b", "a=>1"])
def test_what_is_no_condition_is_refused(text):
    with pytest.raises(InputError, match=r"is no condition|is no number"):
        parse_filters([text])


def write(folder, kind):
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif kind == "csv":
        rows = [f"{row['text']},{row['lang']},{row['score']}\n" for row in ROWS]
        path.write_text("".join(["text,lang,score\n", *rows]))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=7)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_rows_are_left_out_and_counted(kind, tmp_path):
    result = run([write(tmp_path, kind)], tmp_path / "out", where=WHERE)
    assert decode_documents(tmp_path / "out") == KEPT
    assert result.total.filtered == len(ROWS) - len(KEPT) and result.total.broken == 0


def test_streams_leave_out_the_same(tmp_path):
    path = write(tmp_path, "jsonl")
    source = {"path": str(path), "where": WHERE}
    config = configure(tmp_path, source, split=(1.0, 0.0, 0.0)).replace(train={"seq": 10})
    with open_loader(config) as loader:
        tokens = {
            token for step in range(3) for _, row in list_rows(loader.next()) for token in row
        }
        epoch = loader.state["streams"][str(path)]
    assert tokens <= {*"".join(KEPT).encode(), 256} and epoch[0] >= 1


def test_rows_without_a_field_are_broken(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a", "lang": "en"}\n{"text": "b"}\n')
    with pytest.raises(InputError, match=r"rows.jsonl:2: no field 'lang', which lang=en needs"):
        run([path], tmp_path / "out", where=("lang=en",))
    result = run([path], tmp_path / "out", where=("lang=en",), skip_broken=True)
    assert decode_documents(tmp_path / "out") == ["a"] and result.total.broken == 1


def test_columns_that_are_not_there_and_plain_text_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"no column 'langs' for langs=en; .*nearest: --key lang"):
        run([write(tmp_path, "parquet")], tmp_path / "out", where=("langs=en",))
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(InputError, match=r"a.txt is plain text, which has no fields for lang=en"):
        run([tmp_path / "a.txt"], tmp_path / "out", where=("lang=en",))
