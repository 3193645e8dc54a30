"""The samples, and beside them what a page must stand: steps that fail and texts that are markup."""

from pathlib import Path

from tests.repositories import NUMBER_BATCHES, write_graph, write_model

#: Runs if a page takes it for markup. Quotes are those that a graph's text can hold.
MARKUP = "<img src=x onerror='window.pwned=1'><script>window.pwned=1</script>"

_TEXT = 'input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }\n'
_MODEL = f'''
"""Answers with markup; raises an error of markup for the text `fail`."""
import numpy as np
import triton_python_backend_utils as pb_utils

MARKUP = {MARKUP!r}

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()) for request in requests]

    def answer(self, texts):
        if b"fail" in texts:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("the step failed " + MARKUP))
        answers = np.full(texts.shape, MARKUP.encode(), object)
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("HTML", answers)])
'''
#: A switch whose case and condition are markup, before a model whose answers and errors are.
_GRAPH = f"""# A graph told as markup: {MARKUP}
name: "hostile"
platform: "graph"
{_TEXT}output {{ name: "HTML" data_type: TYPE_STRING dims: [ 1 ] }}
node {{ name: "root" sequence {{ step {{ name: "choose" node: "choose" }} }} }}
node {{ name: "choose" switch {{
  on: 'get(parameters, "way", "{MARKUP.replace("'", chr(92) + "'")}")'
  step {{ case: "{MARKUP}" model_name: "hostile_model" }}
  step {{ name: "other" otherwise: true model_name: "hostile_model" }}
}} }}
"""
#: A name that no graph may have; the router tells why it does not serve it.
BAD_NAME = "<b onclick=alert(1)>graph"
_NUMBERS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "X").as_numpy()) for request in requests]

    def answer(self, numbers):
        if %s:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("negative numbers have no root"))
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("Y", %s(numbers))])
"""
_ROOTS = """# Square roots, of which there are none for negative numbers.
name: "roots"
platform: "graph"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }
node { name: "root" sequence {
  step { name: "copy" model_name: "copy" output_map { key: "Y" value: "NUMBER" } }
  step { name: "root" model_name: "sqrt" input_map { key: "X" value: "NUMBER" } }
} }
"""
#: A splitter between the two models of the roots; `%s` is what divides the requests.
_DIVIDED = """platform: "graph"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }
node { name: "root" splitter {
  step { name: "old" model_name: "sqrt" weight: 1 }
  step { name: "new" model_name: "copy" %s }
} }
"""
_ROLLOUT = """}
  sticky_by: "request.id"
  rollout { steps: [ 10, 50, 100 ] every: "1h" guard { max_error_rate: 0.5 min_requests: 1000 } """


def write_repository(root: Path, samples: Path | None, *, is_hostile: bool = True) -> Path:
    """A repository of the samples, or else of graphs with a rollout and a bandit; `roots`, and what is markup."""
    for room in ("graphs", "preprocess", "model", "postprocess"):
        (root / room).mkdir(parents=True)
        for folder in sorted((samples / room).iterdir()) if samples else ():
            (root / room / folder.name).symlink_to(folder)
    (root / "data").symlink_to(samples / "data") if samples else None
    if is_hostile:
        write_graph(root / "graphs", "hostile", _GRAPH)
    if is_hostile and samples:
        write_graph(root / "graphs", BAD_NAME, _ROOTS)
    write_graph(root / "graphs", "roots", _ROOTS)
    if samples is None:
        write_graph(root / "graphs", "canary", 'name: "canary"\n' + _DIVIDED % _ROLLOUT)
        bandit = "weight: 1 } bandit { algorithm: EPSILON_GREEDY epsilon: 0.5 "
        write_graph(root / "graphs", "learner", 'name: "learner"\n' + _DIVIDED % bandit)
    write_model(
        root / "postprocess",
        "hostile_model",
        _MODEL,
        _TEXT + 'output { name: "HTML" data_type: TYPE_STRING dims: [ 1 ] }',
    )
    for name, check, function in (("sqrt", "(numbers < 0).any()", "np.sqrt"), ("copy", "False", "np.copy")):
        write_model(root / "postprocess", name, _NUMBERS % (check, function), NUMBER_BATCHES)
    return root
