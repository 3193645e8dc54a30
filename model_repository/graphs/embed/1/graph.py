from pathlib import Path

import weft
from weft import FP32, INT64, STRING, Tensor

REPOSITORY = Path(__file__).parents[3]
m = weft.models(REPOSITORY)


@weft.graph(max_batch_size=32)
def embed(TEXT: Tensor[STRING, 1]) -> weft.Outputs(EMBEDDING=Tensor[FP32, 384], NUM_TOKENS=Tensor[INT64, 1]):
    """A text to a sentence embedding of length 1; the cosine of two texts is the dot product of their embeddings.
    NUM_TOKENS is the usage over OpenAI's interface.
    """
    tokenize = m.tokenize_minilm(TEXT, name="tokenize", outputs={"num_tokens": "NUM_TOKENS"})
    encode = m.minilm(
        input_ids=tokenize.input_ids,
        attention_mask=tokenize.attention_mask,
        token_type_ids=tokenize.token_type_ids,
        name="encode",
    )
    pool = m.mean_pool(last_hidden_state=encode.last_hidden_state, attention_mask=tokenize.attention_mask, name="pool")
    return {"EMBEDDING": pool.EMBEDDING, "NUM_TOKENS": tokenize.NUM_TOKENS}


if __name__ == "__main__":
    weft.write(embed, to=REPOSITORY)
