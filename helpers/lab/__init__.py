"""The laboratory: what measures, predicts, draws, teaches and diagnoses. It imports ``helpers``, never the other
way."""
