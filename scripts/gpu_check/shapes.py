"""Shapes of models, and bench_train on them."""
from runner import Failed, json_lines

ONE_RANK = ["--tp", "1", "--pp", "1", "--dp", "1"]
# Llama-3.2-1B and Llama-3.1-8B
SMALL = {"hidden-size": 2048, "intermediate-size": 8192, "layers": 16, "heads": 32, "kv-heads": 8, "vocab-size": 128256,
         "seq-len": 4096, "batch-size": 8, "steps": 30}
LARGE = {"hidden-size": 4096, "intermediate-size": 14336, "layers": 32, "heads": 32, "kv-heads": 8, "vocab-size": 128256,
         "seq-len": 4096, "batch-size": 1, "steps": 30}
# As wide as the first, for a step that is compared number by number: attention in f32 is not made for length.
WIDE = {**SMALL, "layers": 2, "seq-len": 1024, "batch-size": 2, "steps": 2}
TINY = {"hidden-size": 32, "intermediate-size": 48, "layers": 2, "heads": 4, "kv-heads": 2, "vocab-size": 97, "seq-len": 8,
        "batch-size": 2, "steps": 2}
# As wide, with an optimizer's state of 1.7 GB that passes through a disk in each step.
OFFLOADED = {**SMALL, "layers": 2, "vocab-size": 8192, "seq-len": 1024, "batch-size": 4, "steps": 6}
# Of cuDNN's backward pass, by what the environment says.
FORMS = {"accumulating": {"CANDLE_TRAIN_DETERMINISTIC": "0"}, "deterministic": {"CANDLE_TRAIN_DETERMINISTIC": "1"}}
ALL_BUT_NORMS = "proj|embed_tokens|lm_head"


def flags(shape):
    return [text for name, value in shape.items() for text in ("--" + name, str(value))]


def attention_must_be_cudnn(run):
    """Where cuDNN cannot do it our own kernels would, slowly and unnoticed: with this it is an error."""
    return {} if run.smoke else {"CANDLE_TRAIN_ATTENTION": "cudnn"}


def bench_train(run, what, arguments, deadline, variables=None):
    text = run.ours(what, "bench_train", ["--device", "cuda:0", *arguments], deadline, variables)
    return json_lines(text)[-1] | {"profile": profile(text)}


def profile(text):
    """The lines of the table of --profile."""
    lines = text.splitlines()
    header = next((i for i, line in enumerate(lines) if line.startswith("operation ")), None)
    return [] if header is None else [line for line in lines[header:] if not line.startswith("{")]


def ours(run, what, arguments, batch_size, deadline):
    """A measurement in bf16, with attention by cuDNN, of the whole batch at once, or in as few parts as memory allows."""
    size, short = batch_size, []
    while True:
        try:
            line = bench_train(run, what, ["--dtype", "bf16", *arguments, "--micro-batch-size", str(size)], deadline,
                               attention_must_be_cudnn(run))
        except Failed as error:
            is_out_of_memory = any(words in str(error) for words in ("OUT_OF_MEMORY", "ALLOC_FAILED", "ALLOCATION_FAILED"))
            if not is_out_of_memory or size == 1:
                raise
            short.append(size)
            size //= 2
            continue
        if not run.smoke and line["attention"] != "cudnn":
            raise Failed(f"{what}: attention was computed by {line['attention']}, expected cudnn")
        return line | {"out_of_memory_with": short}
