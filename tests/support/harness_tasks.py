"""Tasks of lm-evaluation-harness in local files: multiple choice, scoring of texts, generation."""

import json

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{text}"
doc_to_target: "{target}"
{more}
"""
QUESTIONS = [
    {"q": f"question {n}:", "options": [f"yes {n}", f"no, not {n * n}", "maybe"], "answer": n % 3}
    for n in range(12)
]
TEXTS = ["one text", "and a longer one, which takes more than one window of the model", "é"]


def write_tasks(folder):
    """Write three tasks into a folder: `choose`, `roll` and `generate`. Returns the folder."""
    for name, rows in (("questions", QUESTIONS), ("texts", [{"t": text} for text in TEXTS])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    choose = "doc_to_choice: options\nmetric_list: [{metric: acc}]"
    rolling = "metric_list: [{metric: bits_per_byte}, {metric: byte_perplexity}]"
    generate = (
        'generation_kwargs: {until: ["e"], max_gen_toks: 5, do_sample: false}\n'
        "metric_list: [{metric: exact_match}]"
    )
    for name, file, kind, text, target, options in (
        ("choose", "questions", "multiple_choice", "{{q}}", "{{answer}}", choose),
        ("roll", "texts", "loglikelihood_rolling", "", "{{t}}", rolling),
        ("generate", "questions", "generate_until", "{{q}}", "yes", generate),
    ):
        file = folder / f"{file}.jsonl"
        task_text = TASK.format(
            name=name, file=file, kind=kind, text=text, target=target, more=options
        )
        (folder / f"{name}.yaml").write_text(task_text)
    return folder
