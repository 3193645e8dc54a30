from pathlib import Path

import weft
from weft import BOOL, STRING, UINT32, Tensor

REPOSITORY = Path(__file__).parents[3]
m = weft.models(REPOSITORY)


@weft.graph(max_inflight_responses=4)
def write(
    text_input: Tensor[STRING, 1],
    sampling_parameters: Tensor[STRING, 1] = None,
    stream: Tensor[BOOL, 1] = None,
) -> weft.Outputs(
    text_output=Tensor[STRING, 1],
    finish_reason=Tensor[STRING, 1],
    num_input_tokens=Tensor[UINT32, 1],
    num_output_tokens=Tensor[UINT32, 1],
):
    """A language model between its tokenizer and its detokenizer, each a service of its own; the answer comes as a
    stream, the text of up to four responses made at once.
    """
    tokenize = m.tokenize_writer(text_input, name="tokenize")
    write_step = m.writer(
        text_input=text_input,
        input_ids=tokenize.input_ids,
        stream=stream,
        sampling_parameters=sampling_parameters,
        name="write",
        outputs={"text_output": "own_text"},
    )
    detokenize = m.detokenize_writer(
        output_ids=write_step.output_ids,
        context_ids=write_step.context_ids,
        num_previous_tokens=write_step.num_previous_tokens,
        finish_reason=write_step.finish_reason,
        sampling_parameters=sampling_parameters,
        name="detokenize",
    )
    return {
        "text_output": detokenize.text_output,
        "finish_reason": write_step.finish_reason,
        "num_input_tokens": write_step.num_input_tokens,
        "num_output_tokens": write_step.num_output_tokens,
    }


if __name__ == "__main__":
    weft.write(write, to=REPOSITORY)
