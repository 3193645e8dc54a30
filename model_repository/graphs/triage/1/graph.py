from pathlib import Path

import weft
from weft import FP32, STRING, Tensor, parameter

REPOSITORY = Path(__file__).parents[3]
m = weft.models(REPOSITORY)


@weft.node
def by_team(LABEL, EMBEDDING):
    return weft.switch(
        {
            "billing": m.answer_billing(EMBEDDING, fallback=m.answer_general),
            "technical": m.answer_technical(EMBEDDING, fallback=m.answer_general),
            "account": m.answer_account(EMBEDDING, fallback=m.answer_general),
            "shipping": m.answer_shipping(EMBEDDING, fallback=m.answer_general),
        },
        on=parameter("team", LABEL.text()),
        per_row=True,
        otherwise=m.answer_general(EMBEDDING, name="general"),
    )


@weft.graph(
    max_batch_size=32,
    import_=[{"graph": "embed", "version": 1, "as": "embed"}],
    retry={"attempts": 2, "on": "UNAVAILABLE", "budget_percent": 20},
)
def triage(TEXT: Tensor[STRING, 1]) -> weft.Outputs(
    ANSWER=Tensor[STRING, 1],
    LABEL=Tensor[STRING, 1],
    PROBS=Tensor[FP32, 5],
):
    """Support messages to the team each is for, and that team's nearest canned answer. No model was trained for it:
    the label is the one whose descriptions are nearest to the message. Every message of a batch goes its own way. A
    parameter "team" overrides the label, for all of them.
    """
    embed = m.embed(TEXT, name="embed")
    score = m.support_labels(embed.EMBEDDING, name="score")
    label = m.triage_label(score.SCORES, name="label")
    answer = by_team(LABEL=label.LABEL, EMBEDDING=embed.EMBEDDING, name="answer")
    return {"ANSWER": answer.ANSWER, "LABEL": label.LABEL, "PROBS": label.PROBS}


if __name__ == "__main__":
    weft.write(triage, to=REPOSITORY)
