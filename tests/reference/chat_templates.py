#!/usr/bin/env python3
"""Chat templates as Jinja2 itself renders them, to compare with.

    chat_templates.py published FOLDER > cases.json   every *.jinja of a folder with many conversations; made when a test runs,
                                                      since the templates are their publishers' and do not travel with Thimble
    chat_templates.py own > chat_templates.json       templates written for the test, one for each construct; committed

An array of templates: "name", "source" and "cases", each with "name", "variables" (JSON in a string) and "output", or "error" where Jinja2
refuses. The environment is that of the
programs that publish templates: nothing given can be changed but by a list's append, extend, insert and pop, blocks trimmed, loop controls, a generation tag that does
nothing, JSON without escapes for HTML.
"""

import datetime
import glob
import json
import os
import sys

import jinja2
import jinja2.ext
import jinja2.sandbox

NOW = datetime.datetime(2025, 3, 7, 9, 5, 2)  # 1741338302 seconds after 1970


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """transformers', but that lists may grow and shrink: templates that other programs publish count on it."""

    def is_safe_attribute(self, obj, attr, value):
        return (type(obj) is list and attr in ("append", "extend", "insert", "pop")) or super().is_safe_attribute(obj, attr, value)


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("written"), [], [], body, lineno=line)

    def written(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    env = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.filters["from_json"] = json.loads  # of another runtime, which some templates know
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = NOW.strftime
    return env


def compiled(source):
    """The template, or what Jinja2 says against it."""
    try:
        return environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        return error


def rendered(template, name, variables):
    case = {"name": name, "variables": json.dumps(variables, ensure_ascii=False)}
    try:
        if isinstance(template, Exception):
            raise template
        case["output"] = template.render(**json.loads(case["variables"]))
    except Exception as error:  # what Python raises for a wrong type, too
        case["error"] = f"{type(error).__name__}: {error}"
    return case


def group(name, source, cases):
    template = compiled(source)
    return {"name": name, "source": source, "cases": [rendered(template, *c) for c in cases]}


# ---- conversations for published templates ----

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Tells the weather; \"now\" or later.",
    "parameters": {"type": "object", "properties": {
        "city": {"type": "string", "description": "The city's name, Zürich for example"},
        "days": {"type": "integer", "description": "How many", "default": 1},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "near": {"type": "array", "items": {"type": "string"}, "nullable": True},
        "options": {"type": "object", "properties": {"wind": {"type": "boolean"}}, "required": ["wind"]}},
        "required": ["city"]},
    "return": {"type": "object", "description": "the weather"}}}
CLOCK = {"type": "function", "function": {
    "name": "clock", "description": "", "parameters": {"type": "object", "properties": {}}}}


def text(role, content, **more):
    return {"role": role, "content": content, **more}


def called(arguments, content="", **more):
    call = {"id": "call12345", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    return text("assistant", content, tool_calls=[call], **more)


def conversations():
    system, user = text("system", " You are brief. "), text("user", "Hi there!\n")
    answer, again = text("assistant", "Hello <b>you</b>, \"friend\"."), text("user", "And why is the sky blue? 空は青い")
    thought = text("assistant", "<think>\nHm, colours.\n</think>\n\nBecause of the air.")
    reasoned = text("assistant", "Because.", reasoning_content="Light is scattered.")
    parts = text("user", [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}])
    result = text("tool", "{\"degrees\": 21.5}", tool_call_id="call12345", name="get_weather")
    asked = {"city": "Zürich", "days": 2, "wind": {"fast": True, "slow": None}, "near": ["a", "b"], "x": 0.5}
    chats = {
        "user": [user], "system": [system, user], "turns": [user, answer, again],
        "system turns": [system, user, answer, again, answer, user], "answered": [user, answer],
        "thinking": [user, thought, again], "thinking last": [user, thought],
        "reasoning": [system, user, reasoned, again], "parts": [parts], "system later": [user, system],
        "two users": [user, user], "assistant first": [answer, user], "nothing": [],
        "empty": [text("user", "")], "unknown role": [user, text("critic", "no")],
        "developer": [text("developer", "Be kind."), user], "no content": [user, text("assistant", None), again],
        "called": [user, called(asked), result, again], "called with text": [user, called(asked, "Let me see."), result],
        "called in thought": [user, called(asked, reasoning_content="I look."), result],
        "called as text": [user, called(json.dumps(asked)), result, text("assistant", "21.5 degrees."), again],
        "calls": [user, called(asked), result, called({"city": "Bern"}), result],
        "pending": [user, called({"city": "Bern"})],
        "large integers": [user, called({"city": "Bern", "days": 2 ** 100, "near": [-2 ** 64]}), result],
    }
    plain = {"bos_token": "<s>", "eos_token": "</s>", "tools": None, "documents": None, "add_generation_prompt": False}
    more = [{"add_generation_prompt": True}, {}, {"add_generation_prompt": True, "enable_thinking": False},
            {"add_generation_prompt": True, "enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
            {"add_generation_prompt": True, "tools": [WEATHER, CLOCK]},
            {"tools": [WEATHER], "documents": [{"title": "T", "text": "words"}], "date_string": "1 May 2025",
             "preserve_thinking": True, "keep_past_thinking": True, "builtin_tools": ["code_interpreter", "search"]}]
    for name, messages in chats.items():
        for i, extra in enumerate(more):
            yield f"{name}, {i}", {**plain, "messages": messages, **extra}


def published(folder):
    chats = list(conversations())
    for path in sorted(glob.glob(os.path.join(folder, "*.jinja"))):
        with open(path, encoding="utf-8", newline="") as file:
            yield group(os.path.basename(path), file.read(), chats)


def main():
    if sys.argv[1] == "published":
        json.dump(list(published(sys.argv[2])), sys.stdout)
    else:
        import chat_template_cases
        import chat_template_styles
        chats = dict(conversations())
        styles = [(name, source, [(chat, chats[chat]) for chat in chat_template_styles.CHATS])
                  for name, source in chat_template_styles.STYLES.items()]
        json.dump([group(*g) for g in chat_template_cases.GROUPS + styles], sys.stdout, indent=1, ensure_ascii=False)
        print()


if __name__ == "__main__":
    main()
