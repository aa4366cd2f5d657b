"""What is read of a shell script is what a shell makes of it, without running anything.

Tests `megaframe.migration.shell_tests` and `megaframe.migration.shell_words`.
"""

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaframe.errors import UserError
from megaframe.migration.literals import compute_integer
from megaframe.migration.shell_reader import find_invocation, read_script
from megaframe.migration.shell_script import MARK, MAX_CHARACTERS

SNIPPETS = [
    "A=12; OUT=(--layers $A)",
    "A=12\nOUT=(--layers ${A} # how many\n  --hidden $((A * 64)))",
    "export A=3 B=4; OUT=($A $B)",
    'A="--x 1 --y 2"; OUT=($A)',
    'A="--x 1 --y 2"; OUT=("$A")',
    'A=\'$B "q"\'; OUT=("$A" $A)',
    "ONE=(--x 1 '--y 2'); TWO=(--z); OUT=(${ONE[@]} ${TWO[@]})",
    'ONE=(--x 1 \'--y 2\'); TWO=(--z); OUT=("${ONE[@]}" "${TWO[@]}")',
    'ONE=(a b); OUT=("${ONE[*]}" "${ONE[1]}" ${ONE[0]}x)',
    'ONE=(a "b c"); OUT=("pre ${ONE[*]} post")',
    "OUT=(a); OUT+=(b 'c d'); OUT+=(); OUT+=($NOTHING_IS_SET)",
    "A=x; A+=y; OUT=(${A}z)",
    'OUT=(${UNSET_HERE:-7} ${UNSET_HERE:-a b} "${UNSET_HERE:-a b}" ${UNSET_HERE-e})',
    'A=; B=set; OUT=(${A:-empty} ${A-unset} ${B:+other} "${A:+none}" ${B:-no})',
    'B=in; OUT=(${UNSET_HERE:-${B}/x} "${UNSET_HERE:-"$B"}")',
    ": ${UNSET_ONE:=5}; OUT=($UNSET_ONE)",
    "OUT=(--a \\\n --b \\\n  --c)",
    'OUT=(\'it\'\'s\' "a\\"b" c\\ d "\\$A" "e\\f" \'\')',
    "A=2 # the number\nOUT=(a#b $A) # end",
    "N=8; M=4; OUT=($((N*M)) $(($N / 3)) $(( (N+1) % M )) $((-7/2)) $((${N}-9)))",
    "A=fp8; if [ $A = fp8 ]; then OUT=(yes); else OUT=(no); fi",
    'A=fp8; OUT=(); if [[ "$A" == "bf16" || -z "$A" ]]; then OUT+=(x); elif [[ "$A" == fp8 && '
    '-n "$A" ]]; then OUT+=(y); else OUT+=(z); fi; OUT+=(end)',
    "N=16; if [ $N -gt 8 ]\nthen\n  if [ ! $N -eq 16 ]; then OUT=(a); else OUT=(b); fi\nfi",
    "A=7B; case $A in 13B) OUT=(l);; 7B|8B)\n OUT=(s)\n;; *) OUT=(other) ;; esac",
    'A=70B; case "${A}" in "7B") OUT=(s) ;; *) OUT=(other) ;; esac; OUT+=(after)',
    "A=1; [ $A = 1 ] && OUT=(y) || OUT=(n)",
    "A=1; [ $A = 2 ] && OUT=(y) || OUT=(n)",
    "true && OUT=(a); [ -z '' ] && OUT+=(b); [ -n '' ] || OUT+=(c)",
    "{ A=1; B=2; }; OUT=($A$B)",
    "set -e; A=1; unset A; OUT=(x$A)",
    "cat <<EOF >/dev/null\nA=9 'not closed\nEOF\nOUT=(after)",
    "OUT=($'tab' \"\" -1 a=b --x='1 2')",
]


def run_all(scripts):
    """Return what a shell puts into the array OUT in each script, all in one process."""
    end = "printf '%s\\0' \"${OUT[@]}\" \"${#OUT[@]}\"; printf 'END\\0'"
    program = "\n".join(f"( {script}\n{end} )" for script in scripts)
    process = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
    outputs = [text.split("\0")[:-1] for text in process.stdout.split("END\0")[:-1]]
    assert len(outputs) == len(scripts), process.stderr
    return [tuple(words[:-1]) if words[-1] != "0" else () for words in outputs]


def test_words_are_those_of_a_shell():
    for snippet, expected in zip(SNIPPETS, run_all(SNIPPETS), strict=True):
        assert read_script(snippet, {"NOTHING_IS_SET": ""}).variables["OUT"] == expected, snippet


NAMES = st.sampled_from("ABC")
LITERALS = st.sampled_from(["x", "1", "a b", "", "-7", "--z"])
EXPANSIONS = st.builds(
    "{}{}{}".format,
    st.sampled_from(["", "p"]),
    NAMES.flatmap(
        lambda n: st.sampled_from([f"${n}", f"${{{n}}}", f"${{{n}:-d e}}", f"${{{n}-}}"])
    ),
    st.sampled_from(["", "-q", "$B"]),
)
WORDS = EXPANSIONS | EXPANSIONS.map(lambda text: f'"{text}"') | LITERALS.map(lambda t: f"'{t}'")
STATEMENTS = st.lists(st.builds("{}={}".format, NAMES, WORDS), min_size=1, max_size=4)
SCRIPTS = st.builds(
    lambda statements, words: "\n".join(
        ["A=0; B=1; C='2 3'", *statements, f"OUT=({' '.join(words)})"]
    ),
    STATEMENTS,
    st.lists(WORDS, max_size=4),
)


@settings(max_examples=3)
@given(st.lists(SCRIPTS, min_size=30, max_size=30))
def test_random_assignments_and_expansions_too(scripts):
    for script, expected in zip(scripts, run_all(scripts), strict=True):
        assert read_script(script, {}).variables["OUT"] == expected, script


def find(text, **given_variables):
    """Return the arguments in a script, with what is unknown as $NAME, and its notes."""
    script = read_script(text, given_variables)
    words = [
        " ".join(word.replace(MARK, "%").split("\u00a0"))
        for word in find_invocation(script).arguments
    ]
    return words, [note for _, note in script.notes]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("D=$1\ntorchrun --nnodes 2 x/pretrain_gpt.py --data-path $D", ["--data-path", "%$D%"]),
        ("python t.py --lr $LR", ["--lr", "%$LR%"]),
        ("L=$(cat lr)\npython t.py --lr ${L}", ["--lr", "%$L%"]),
        ("L=`rm -rf x`\npython t.py --lr=$L", ["--lr=%$L%"]),
        ("python t.py --a ${X%.*}", ["--a", "%${X%.*}%"]),
        ("python t.py --a $((N * 2))", ["--a", "%$((N * 2))%"]),
        ("A='--x 1'\nsrun bash -c \"cd y; python t.py $A\"", ["--x", "1"]),
        ("sbatch <<EOF\n#!/bin/bash\nsrun python t.py --x 1\nEOF", ["--x", "1"]),
        ("run() {\n python t.py --x 1\n}\nrun", ["--x", "1"]),
        ("function run {\n python t.py --x 1\n}", ["--x", "1"]),
        ("( cd y && python t.py --x 1 ) > log 2>&1 | tee log", ["--x", "1"]),
        ("echo python a.py\npython prepare.py --in x\npython t.py --x 1 --y", ["--x", "1", "--y"]),
        ("--x 1 \\\n --y 2", ["--x", "1", "--y", "2"]),
        ("A=(--x 1)\nB='--y 2 --z'\nC=no", ["--x", "1", "--y", "2", "--z"]),
        ("for i in 1 2; do L=$i; done\npython t.py --lr $L", ["--lr", "%$L%"]),
        ("L=1; if grep -q x y; then L=2; fi\npython t.py --lr $L", ["--lr", "%$L%"]),
        ("exit\npython t.py --x 1\nA=(--y)", []),
        ("python t.py --x 1\\", ["--x", "1"]),
        ("python t.py --x \xe9\u2028", ["--x", "\xe9\u2028"]),
    ],
)
def test_the_arguments_of_a_training_program(text, words):
    if words:
        assert find(text)[0] == words
    else:
        with pytest.raises(UserError, match="no command with options"):
            find(text)


def test_given_variables_replace_those_of_the_script():
    text = "D=$1\nN=2\nif [ $N = 4 ]; then X=(--four); fi\npython t.py --d $D --n $N ${X[@]}"
    assert find(text, D="/data", N="4")[0] == ["--d", "/data", "--n", "4", "--four"]


def test_what_may_be_added_is_said_and_left_out():
    text = 'A=(--x)\nif [ -n "$KEY" ]; then A+=(--w p); fi\n. env.sh\npython t.py ${A[@]}'
    words, notes = find(text)
    assert words == ["--x"]
    assert "what A+= adds is left out" in notes[0] and "env.sh is not read" in notes[1]


def test_nothing_is_run(tmp_path):
    planted = tmp_path / "planted"
    text = f"A=$(touch {planted}) `touch {planted}`; touch {planted}; eval 'touch {planted}'\n"
    find(f"{text}python t.py --a $A $(touch {planted})")
    assert not planted.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A='x", "line 1: a ' is not closed"),
        ('\nA="x', 'line 2: a " is not closed'),
        ("A=(a\nb", "is not closed"),
        ("A=${B", "not closed"),
        ("A=$((1", "not closed"),
        ("if [ 1 = 1 ]; then A=1", "fi is missing"),
        ("if true\nA=1", "no `then`"),
        ("A=x\n" + "A=$A$A\n" * 64, f"grow to more than {MAX_CHARACTERS:,} characters"),
        ("A=(a b)\n" + "A=(${A[@]} ${A[@]})\n" * 64, "grow to more than"),
        ("A=" + "${X:-" * 100 + "}" * 100, "holds too many others"),
        ("{ " * 100 + "} " * 100, "nested too deep"),
        ("if true; then " * 100, "nested too deep"),
        ("A=" + "(A=" * 1 + "x", "not closed"),
        ("A=(" * 100, "nested more than"),
        ("X='python t.py --a'\n" + 'bash -c "$X --x"\n', None),
        ("", "no command with options"),
    ],
)
def test_what_no_shell_takes_or_grows_beyond_bounds_is_refused(text, message):
    if message is None:
        find(text)
        return
    with pytest.raises(UserError) as refusal:
        find(text)
    assert message in str(refusal.value)


@settings(max_examples=300)
@given(
    st.text(max_size=200)
    | st.lists(
        st.sampled_from(
            ["A=", "$A", "${A", "}", "(", ")", "((", "))", "'", '"', "`", "$(", "\\", "\n", " ",
             "if", "then", "fi", "else", "case", "in", "esac", ";;", "for", "do", "done", "<<E",
             "E", "#", "&&", "||", "[ ", " ]", "[[", "]]", "t.py", "--x", "=", "{", "function"]
        ),
        max_size=40,
    ).map("".join)
)  # fmt: skip
def test_any_text_is_read_or_refused_with_a_message(text):
    try:
        find(text)
    except UserError as refusal:
        assert str(refusal)


@pytest.mark.parametrize(
    ("text", "value"),
    [("7 / 2", 3), ("-7 / 2", -3), ("a * 2", 6), ("b", None), ("1 / 0", None), ("2 ** 9", None),
     ("9" * 30, None), ("(" * 500, None), ("1+" * 5000 + "1", None), ("'a' * 9", None),
     ("__import__('os')", None)],
)  # fmt: skip
def test_arithmetic_is_of_whole_numbers_and_bounded(text, value):
    assert compute_integer(text, lambda name: {"a": 3}.get(name)) == value
