"""A small agent with the standard library only: asks, runs the tools that it is told to run, writes its answer down.

Usage: tool_agent.py [chat|messages]
"""

import json
import os
import sys
import urllib.error
import urllib.request

TOOL = {
    "name": "add",
    "description": "Add two numbers.",
    "schema": {"type": "object", "properties": {"a": {}, "b": {}}},
}


def post(url, body, headers):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        sys.exit(f"{error.code}: {json.load(error)['error']['message']}")


def chat(messages):
    function = {"name": TOOL["name"], "description": TOOL["description"], "parameters": TOOL["schema"]}
    body = {"model": "any", "messages": messages, "tools": [{"type": "function", "function": function}]}
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    message = post(f"{url}/chat/completions", body, {"Authorization": f"Bearer {key}"})["choices"][0]["message"]
    messages.append(message)
    results = []
    for call in message.get("tool_calls") or []:
        value = add(json.loads(call["function"]["arguments"]))
        results.append({"role": "tool", "tool_call_id": call["id"], "content": value})
    messages.extend(results)
    return message["content"], bool(results)


def anthropic(messages):
    tools = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["schema"]}]
    body = {"model": "any", "max_tokens": 100, "messages": messages, "tools": tools}
    url, key = os.environ["ANTHROPIC_BASE_URL"], os.environ["ANTHROPIC_API_KEY"]
    content = post(f"{url}/v1/messages", body, {"x-api-key": key, "anthropic-version": "2023-06-01"})["content"]
    messages.append({"role": "assistant", "content": content})
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": add(block["input"])}
        for block in content
        if block["type"] == "tool_use"
    ]
    if results:
        messages.append({"role": "user", "content": results})
    return "".join(block["text"] for block in content if block["type"] == "text"), bool(results)


def add(arguments):
    return str(arguments["a"] + arguments["b"])


def main():
    speak = anthropic if sys.argv[1:] == ["messages"] else chat
    with open("/task/instruction.md") as file:
        messages = [{"role": "user", "content": file.read()}]
    goes_on = True
    while goes_on:
        text, goes_on = speak(messages)
    with open("/work/answer.txt", "w") as file:
        file.write(text)
    print("wrote", text)


main()
