"""Chat over documents, streamed: python examples/chat.py [URL]

Ask two questions about the same documents. The second one finds them in the cache.
"""

import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
DOCUMENTS = [
    {"id": "express", "text": "The departure time of the Skarrow Express is 7:40."},
    {"id": "museum", "text": "The entrance fee of the Clock Museum is six francs."},
]
QUESTIONS = ("When does the Skarrow Express leave?", "What is the entrance fee of the Clock Museum?")

client = OpenAI(base_url=f"{URL}/v1", api_key="none")
for question in QUESTIONS:
    print(f"> {question}")
    stream = client.chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": question}],
        max_tokens=100,
        temperature=0,
        stream=True,
        extra_body={"cache_prompt": True, "documents": DOCUMENTS},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
    report = chunk.slotcache
    print(f"\n  {report['cached_tokens']} prompt tokens cached, source: {report['source']}")
