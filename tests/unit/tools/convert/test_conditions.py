"""Conditions of KServe in CEL."""

import pytest

from weft.language.types.expression import read_expression
from weft.language.types.signatures import TensorType
from weft.tools.convert.conditions import Body, translate
from weft.tools.convert.draft import DraftCondition
from weft.tools.convert.yaml_tree import YamlValue

TENSORS = {
    "LABEL": TensorType("BYTES", (1,), is_batched=True, is_optional=False, origin=""),
    "P": TensorType("FP32", (3,), is_batched=True, is_optional=False, origin=""),
    "N": TensorType("INT32", (-1, 2), is_batched=False, is_optional=False, origin=""),
    "b-c": TensorType("INT32", (1,), is_batched=True, is_optional=False, origin=""),
}
ONE = {"LABEL": TENSORS["LABEL"]}


def cel(text: str, body: Body, *, is_request: bool = False, is_negated: bool = False) -> str:
    """The translation of a condition."""
    return translate(DraftCondition(text, YamlValue("plain", 1, 1, text), is_request), body, is_negated=is_negated)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[@this].#(LABEL=="dog")', 'text(inputs.LABEL) == "dog"'),
        ("[@this].#(LABEL==dog)", 'text(inputs.LABEL) == "dog"'),
        ('[@this].#(predictions.0.LABEL=="dog")', 'text(inputs.LABEL) == "dog"'),
        ('[@this].#(LABEL != "dog")', 'text(inputs.LABEL) != "dog"'),
        ('[@this].#(outputs.0.data.0=="dog")', 'text(inputs.LABEL) == "dog"'),
        ('[@this].#(outputs.#(name=="P").data.0.2>0.5)', "inputs.P[2] > 0.5"),
        ("[@this].#(P.0.1>=1)", "inputs.P[1] >= 1.0"),
        ("[@this].#(predictions.0.P.1<0.5)", "inputs.P[1] < 0.5"),
        ("[@this].#(N.4.1==-3)", "inputs.N[4][1] == -3"),
        ("[@this].#(b-c==1)", 'inputs["b-c"][0] == 1'),
        ("[@this].#(b-c=1)", 'inputs["b-c"][0] == 1'),
        ('predictions.#(LABEL=="dog")', 'inputs.LABEL.exists(e, e == "dog")'),
        ('[@this].#(predictions.#(LABEL=="dog"))', 'inputs.LABEL.exists(e, e == "dog")'),
        ('[@this].#(LABEL%"d?g*.")', r'text(inputs.LABEL).matches("(?s)^d.g.*\\.$")'),
        ("[@this].#(LABEL!%*cat*)", '!text(inputs.LABEL).matches("(?s)^.*cat.*$")'),
        ("predictions.#(LABEL%*cat*)", 'inputs.LABEL.exists(e, e.matches("(?s)^.*cat.*$"))'),
        ("predictions.#(N>200)", "max(inputs.N) > 200"),
        ("[@this].#(predictions.#(P<=1))", "min(inputs.P) <= 1.0"),
        ("predictions.#(LABEL)", "has(inputs.LABEL)"),
        ("LABEL", "has(inputs.LABEL)"),
        ("[@this].#(LABEL)", "has(inputs.LABEL)"),
        ('outputs.#(name=="P")', "has(inputs.P)"),
        ("@this", "true"),
    ],
)
def test_common_conditions_are_translated(text: str, expected: str) -> None:
    """Equal truth for one row; every piece of the path is used."""
    body = Body("inputs", TENSORS)
    assert (expected, []) == (cel(text, body), body.remarks)
    assert read_expression(expected).faults == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[@this].#(LABEL=="dog")', 'text(outputs.animal) != "dog"'),
        ("[@this].#(P.0.1>=1)", "outputs.P[1] < 1.0"),
        ("[@this].#(P.0.1<1)", "outputs.P[1] >= 1.0"),
        ("LABEL", "!has(outputs.animal)"),
        ('predictions.#(LABEL=="x")', '!outputs.animal.exists(e, e == "x")'),
        ("predictions.#(P>0.5)", "!(max(outputs.P) > 0.5)"),
        ('[@this].#(LABEL!%"d*")', 'text(outputs.animal).matches("(?s)^d.*$")'),
        ("@this", "false"),
        ("[@this].#(a*==1)", '!CHECK("[@this].#(a*==1)")'),
    ],
)
def test_the_opposite_of_a_condition(text: str, expected: str) -> None:
    """What a cascade accepts is what does not go on; names are those of the graph."""
    assert expected == cel(text, Body("outputs", TENSORS, {"LABEL": "animal"}), is_negated=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[@this].#(tier=="gold")', 'get(parameters, "tier", "") == "gold"'),
        ('[@this].#(tier!="gold")', '"tier" in parameters && parameters["tier"] != "gold"'),
        ("[@this].#(n>3)", '"n" in parameters && parameters["n"] > 3'),
        ("[@this].#(ok==true)", '"ok" in parameters && parameters["ok"] == true'),
        ('[@this].#(tier=="")', '"tier" in parameters && parameters["tier"] == ""'),
        ("tier", '"tier" in parameters'),
        ("parameters.debug", '"debug" in parameters'),
        ('[@this].#(tier%"go*")', 'get(parameters, "tier", "").matches("(?s)^go.*$")'),
        ('[@this].#(parameters.lang=="de")', 'get(parameters, "lang", "") == "de"'),
        ('[@this].#(LABEL=="x")', 'text(inputs.LABEL) == "x"'),
    ],
)
def test_fields_of_a_request_that_are_no_tensors_are_parameters(text: str, expected: str) -> None:
    """A test of one that is absent does not hold, as in gjson; an input of that name is the tensor."""
    assert expected == cel(text, Body("inputs", TENSORS), is_request=True)


def test_a_parameter_that_was_a_field_is_to_be_checked() -> None:
    """Clients have to send it another way; those of the V2 protocol's parameters need not."""
    body = Body("inputs", {})
    cel('[@this].#(tier=="gold")', body, is_request=True)
    assert ["'tier' was a field of the request's JSON body"] == [r.split(";")[0] for r in body.remarks]
    body = Body("inputs", {})
    cel('[@this].#(parameters.tier=="gold")', body, is_request=True)
    assert [] == body.remarks


def test_predictions_are_the_only_tensor() -> None:
    """Where there are several, or none is known, a person has to say which."""
    text = '[@this].#(predictions.0=="dog")'
    body = Body("inputs", ONE)
    assert ('text(inputs.LABEL) == "dog"', []) == (cel(text, body), body.remarks)
    body = Body("inputs", None)
    assert 'text(inputs.predictions) == "dog"' == cel(text, body)
    assert ["'predictions' stands for the only tensor of the JSON body; write its name"] == body.remarks
    body = Body("inputs", TENSORS)
    assert cel(text, body).startswith("CHECK(")
    assert "'predictions' may be any of the tensors LABEL, P, N, b-c" in body.remarks[0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "there is none, and KServe never chooses such a step"),
        ("{.target == 'blue'}", "the spelling of KServe before 0.9"),
        ("[@this].#(LABEL%7)", "the pattern 7 is no text"),
        ("[@this].#(P.0.1>0.5 && P.0.1<=0.9)", "gjson has no '&&'"),
        ('[@this].#(a.b.c=="d")', "a tensor has no fields"),
        ("[@this].#(LABEL.1==3)", "it reads row 1; a condition reads one row"),
        ("[@this].#(P.0.1.2==3)", "fewer than the path has indexes"),
        ("[@this].#(P.0.1==null)", "no string, number or boolean"),
        ('[@this].#(LABEL=="a"||"b")', "gjson has no '&&' and no '||'"),
        ("[@this].#(outputs.7.data.0==1)", "which tensor 'outputs.7.data.0' means is not known"),
        ("predictions|@reverse", "what only gjson has"),
        ("x" * 1001, "it has 1001 characters"),
        ("[@this].#(" * 90 + ")" * 90, "what only gjson has"),
    ],
)
def test_what_cel_cannot_say_does_not_compile(text: str, reason: str) -> None:
    """The text stands there in a call that CEL does not know, with the reason."""
    body = Body("inputs", TENSORS)
    assert cel(text, body).startswith('CHECK("')
    assert [reason] == [reason for remark in body.remarks if reason in remark]


def test_what_a_condition_reads_is_known() -> None:
    """By the names of the body, not those of the graph."""
    body = Body("inputs", TENSORS, {"LABEL": "animal"})
    assert 'text(inputs.animal) == "x"' == cel('[@this].#(LABEL=="x")', body)
    assert ["LABEL"] == body.read


@pytest.mark.parametrize(
    ("text", "is_of_one_row"),
    [
        ("predictions.#(N>200)", False),
        ("LABEL", False),
        ('[@this].#(LABEL=="dog")', True),
        ("[@this].#(P.0.1>1)", True),
        ('predictions.#(LABEL=="dog")', True),
    ],
)
def test_what_can_be_asked_of_one_row_alone_is_known(text: str, is_of_one_row: bool) -> None:
    """A largest or smallest value is that of all rows of a request; an element is that of one."""
    body = Body("inputs", TENSORS)
    cel(text, body)
    assert is_of_one_row == body.is_of_one_row


def test_what_holds_of_any_element_is_said() -> None:
    """A reader may take gjson's `#(...)` for all of them."""
    body = Body("inputs", TENSORS)
    cel("predictions.#(N>200)", body)
    assert ["KServe's condition predictions.#(N>200) holds if any element passes, as in gjson"] == body.notes
    assert [] == body.remarks
