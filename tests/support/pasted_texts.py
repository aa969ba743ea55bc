"""Messages with lists of documents, as known programs send them, and pieces of texts that look almost like such lists."""

LINE = "-" * 21
WEBUI = """You are helpful.
### Task: cite as [id], for example [1], if a source has an id.

<context>
<source id="1" name="tides.md">The moon raises two tides a day.</source>
<source id="2" name="ports.md" resource-type="file">The port closes at low tide.

It opens at nine.</source>
<source id="1" name="tides.md">The sun raises tides, too.</source>
</context>"""
ANYTHING = """Given the context, answer.
Context:
[CONTEXT 0]:
The moon raises two tides a day.
[END CONTEXT 0]

[CONTEXT 1]:
The port closes at low tide.
[END CONTEXT 1]

"""
ANYTHING_OLLAMA = "Answer.\nContext:\n[CONTEXT 0]\nOne.\n[END CONTEXT 0]\n\n[CONTEXT 1]\nTwo.\n[END CONTEXT 1]\n"
CLAUDE = """<documents>
  <document index="1">
    <source>a.txt</source>
    <document_content>
      The moon.
    </document_content>
  </document>
  <document index="2">
    <source>b.txt</source>
    <document_content>
      The port.
    </document_content>
  </document>
</documents>

When does it open?"""
LIBRE_ONE = """The user has attached a file to the conversation:
        
              <file>
                <filename>tides.pdf</filename>
                <type>application/pdf</type>
              </file>

        A search found the following context inside <context></context> XML tags.

        <context>
          <file>
            <filename>tides.pdf</filename>
            <context>
            <contextItem>
              <![CDATA[The moon.]]>
            </contextItem>
            <contextItem>
              <![CDATA[The sun.]]>
            </contextItem>
            </context>
          </file>
        </context>

        Use the context."""
LIBRE_TWO = """The user has attached 2 files to the conversation:
          <file>
            <filename>a.txt</filename>
            <context>
The moon.
            </context>
          </file>
          <file>
            <filename>b.txt</filename>
            <context>
The port.
            </context>
          </file>
          Use the context."""
AIDER = """I have *added these files to the chat* so you can go ahead and edit them.

Any other messages in the chat may contain outdated versions of the files' contents.

src/tides.py
```
print("tides")
```

src/ports.py
```
print("ports")
```
"""
CONTINUE = """```src/tides.py
print("tides")
```

```src/ports.py (1-20)
print("ports")
```

What do they print?"""
LLAMA = f"""Context information is below.
{LINE}
page_label: 1
file_path: /data/tides.pdf

The moon.

file_path: /data/ports.md

The port.
{LINE}
Given the context information and not prior knowledge, answer the query.
Query: When does it open?"""
LLAMA_CITED = """Please cite the sources by their numbers.
For example:
Source 1:
The sky is red.
Query: ...
Answer: ... [1].
Below are several numbered sources of information:
------
Source 1:
The moon.


Source 2:
The port.

------
Query: When does it open?"""
LANGCHAIN = """QUESTION: An example?
=========
Content: An example.
Source: 0-pl
=========
FINAL ANSWER: An example.

QUESTION: When does it open?
=========
Content: The moon.
Source: tides.md

Content: The port.
Source: ports.md
=========
FINAL ANSWER:"""
NUMBERED = """Context:
[1] The moon raises two tides a day.

[2] The port closes at low tide.

Question: When does it open?"""
LINES = "Sources:\n[1] The moon.\n[2] The port.\n\nQuestion: When?"

# The text, its documents, and their numbers.
RECORDED = {
    "open-webui": (WEBUI, 3, ("1", "2", "1")),
    "anythingllm": (ANYTHING, 2, ("0", "1")),
    "anythingllm-ollama": (ANYTHING_OLLAMA, 2, ("0", "1")),
    "claude": (CLAUDE, 2, ("1", "2")),
    "librechat": (LIBRE_ONE, 2, ()),
    "librechat-files": (LIBRE_TWO, 2, ()),
    "aider": (AIDER, 2, ()),
    "continue": (CONTINUE, 2, ()),
    "llamaindex": (LLAMA, 2, ()),
    "llamaindex-cited": (LLAMA_CITED, 2, ("1", "2")),
    "langchain": (LANGCHAIN, 2, ()),
    "numbered": (NUMBERED, 2, ("1", "2")),
    "numbered-lines": (LINES, 2, ("1", "2")),
}

PIECES = [
    *('<context>\n', "\n</context>", '<source id="1" name="a">', '<source id="2">', "</source>", "Context:\n"),
    *("[CONTEXT 0]:\n", "\n[END CONTEXT 0]", "\n\n", "\n", "<documents>\n", '<document index="1">', "</document>"),
    *("</documents>", "<document_content>", "```a.py\n", "\n```", "[1] ", "[2] ", "x", "The port. ", "Question: ", " "),
    *(f"{LINE}\n", f"\n{LINE}", "file_path: a.md\n\n", "------\n", "Source 1:\n", "=========\n", "Content: ", "\nSource: b"),
]  # fmt: skip
