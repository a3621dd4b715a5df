"""OpenAI's API over programs: chat completions, completions, responses, models.

Owns the bodies (`types.py`, `responses_types.py`), their translation into a graph (`prompts.py`, `sampling.py`) and of
a graph's events into OpenAI's objects (`chat.py`, `completions.py`, `responses_output.py`). A request is one program:
its prompt and one generation for each sample.
"""
