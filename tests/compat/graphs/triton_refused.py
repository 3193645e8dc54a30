"""Triton: ensembles that are wrong on purpose; each is refused, with the same fault."""

from tests.compat.graphs.shape import Model, Shape

_FOLDER = "triton-inference-server/server: qa/L0_model_config/autofill_noplatform/ensemble"
_MODELS = [
    Model("double", "X:FP32:16", "Y:FP32:16", max_batch_size=4),
    Model("pair", "X:FP32:16", "Y:FP32:16", max_batch_size=2),
    Model("whole", "X:INT32:16", "Y:INT32:16", max_batch_size=4),
    Model("cube", "X:FP32:16,16,16", "Y:FP32:16,16,16", max_batch_size=4),
    Model("three", "A:FP32:16 B:FP32:16 C:FP32:16", "FIRST:FP32:16 SECOND:FP32:16 THIRD:FP32:16", max_batch_size=4),
    Model("four", "A:FP32:16 B:FP32:16 C:FP32:16 D:FP32:16", "Y:FP32:16", max_batch_size=4),
    Model("repeat", "IN:INT32:-1 DELAY:UINT32:-1 WAIT:UINT32:1", "OUT:INT32:1 IDX:UINT32:1", is_decoupled=True),
    Model("add", "A:INT32:1 B:INT32:1", "SUM:INT32:1"),
]
#: Our file, the original's folder, what is said of it.
_REFUSED = [
    ("circle", "circular_dependency", "G003"),
    ("circle_alone", "self_circular_dependency", "G002"),
    ("no_scheduling", "ensemble_scheduling_no_set", "G025 G026"),
    ("no_steps", "no_step, no_step_2", "G017 G025 G026"),
    ("backend", "has_backend", "G026"),
    ("instances", "instance_group_set", "G026"),
    ("warmup", "model_warm_up_set", "G026"),
    ("optimization", "optimization_set", "G026"),
    ("datatype", "inconsistent_data_type", "G007"),
    ("shape", "inconsistent_shape", "G008"),
    ("batch", "invalid_batch_size", "G009"),
    ("unknown_input", "invalid_input_map", "G006 G026"),
    ("unknown_output", "invalid_output_map", "G006"),
    ("no_inputs", "no_input_map", "G026"),
    ("no_outputs", "no_output_map", "G006 G026"),
    ("no_model", "no_model_name", "G026"),
    ("no_such_model", "non_existing_model", "G002"),
    ("no_version", "no_required_version", "G002"),
    ("no_version_second", "no_required_version_2", "G002"),
    ("no_version_first", "no_required_version_3", "G002"),
    ("written_twice", "output_to_tensor_overmapped", "G005"),
    ("unused_of_a_step", "redundant_tensor_as_output", "G026"),
    ("unused_steps", "redundant_tensor_as_input", "G026"),
    ("input_twice", "tensor_to_input_overmapped", "G005 G026"),
    ("unmapped_input", "unmapped_input", "G006"),
    ("unused_input", "unreachable_input", "G026"),
    ("unwritten_output", "unreachable_output", "G017"),
    ("output_of_itself", "unreachable_output_2", "G003"),
    ("output_of_nothing", "unreachable_output_3", "G006"),
    ("two_streams_meet", "invalid_decoupled_branching", "G019"),
    ("two_streams_out", "invalid_decoupled_branching_2", "G019"),
]


SHAPES = [
    Shape(
        f"triton/refused/{name}.pbtxt",
        f"{_FOLDER}/{original}",
        _MODELS,
        refused=code,
        others=("circle_back.pbtxt",) if name == "circle" else (),
    )
    for name, original, code in _REFUSED
]
