"""A conversation that the server remembers: python examples/conversation.py [URL]

Each turn sends only its question and its new documents.
"""

import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
EXPRESS = {"id": "express", "text": "The departure time of the Skarrow Express is 7:40."}
MUSEUM = {"id": "museum", "text": "The entrance fee of the Clock Museum is six francs."}
TURNS = (
    ("When does the Skarrow Express leave?", [EXPRESS]),
    ("What is the entrance fee of the Clock Museum?", [MUSEUM, EXPRESS]),
)

client = OpenAI(base_url=f"{URL}/v1", api_key="none")
for question, documents in TURNS:
    answer = client.chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": question}],
        max_tokens=100,
        temperature=0,
        extra_body={"cache_prompt": True, "conversation": "a day out", "documents": documents},
    )
    report = answer.slotcache
    print(f"> {question}\n{answer.choices[0].message.content}")
    print(f"  turn {report['conversation']['turns']}, {report['cached_tokens']} prompt tokens cached")
    if report["repeated"]:
        print(f"  not shown again: {', '.join(report['repeated'])}")
