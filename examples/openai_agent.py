"""An agent with the official client, its own compaction and reward; of evenstep it knows one header and one call.

examples/openai_agent.toml trains it; anything that speaks the OpenAI API can stand in its place.
"""

import json
import sys

from openai import OpenAI

client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY are set
given = json.load(sys.stdin)
task = {"role": "user", "content": f"{given['task']}\n{given['observation']}"}
messages, said = [task], []
for turn in range(3):
    headers = {}
    if turn == 2:  # its own compaction: the task and a note are kept
        messages = [task, {"role": "user", "content": f"So far you said: {said[-1][:40]} Give the number alone."}]
        headers = {"x-evenstep-break": "compaction"}
    answer = client.chat.completions.create(model="policy", messages=messages, extra_headers=headers).choices[0].message
    said.append(answer.content or "")
    messages += [answer, {"role": "user", "content": "Are you sure?"}]
reward = sum(letter.isdigit() for letter in said[-1]) / max(len(said[-1]), 1)  # how much of it is a number
client.post("/reward", body={"reward": reward}, cast_to=object)
