"""Runs of preprocessing, and what they leave."""

import pytest

from megaframe.data.indexed_dataset import IndexedDataset
from megaframe.data.preprocessing import preprocess
from megaframe.data.preprocessing.corpus_files import CorpusFile, CorpusFormat
from megaframe.data.preprocessing.preprocess import PreprocessJob


def run(inputs, output, workers=1, overwrite=False, tokenizer="bytes", append_eod=True, **options):
    files = tuple(CorpusFile(str(path), CorpusFormat(**options)) for path in inputs)
    job = PreprocessJob(files, tokenizer, str(output), append_eod)
    return preprocess.preprocess(job, workers, overwrite)


def decode_documents(prefix):
    file = IndexedDataset(str(prefix))
    return [bytes(file.get_sequence(n)[:-1].tolist()).decode() for n in range(len(file))]


def interrupt_run(path, output, bytes_done):
    """Start a run on `path` and interrupt it once `bytes_done` bytes are read; return its job."""

    def stop(done, disk_bytes):
        if done.disk_bytes >= bytes_done:
            raise KeyboardInterrupt

    job = PreprocessJob((CorpusFile(str(path)),), "bytes", str(output))
    with pytest.raises(KeyboardInterrupt):
        preprocess.preprocess(job, report=stop)
    return job
