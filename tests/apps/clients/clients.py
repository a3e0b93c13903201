"""Published Python clients, unmodified: clients.py COMMAND SOURCE_FOLDER MODEL

Each test makes one use of a package as its documentation shows it, with a real model on the CPU. What is compared is what
the server promises: forms, schemas, types of events; a small model's words are its own."""
import asyncio
import json
import os
import sys
import unittest
from importlib.metadata import version

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
for name in ("OPENAI_AGENTS_DISABLE_TRACING", "LITELLM_LOCAL_MODEL_COST_MAP"):
    os.environ[name] = "1"  # nothing but the server is asked

from pydantic import BaseModel  # noqa: E402
from serve_client import Server  # noqa: E402

KEY, MODEL = "secret", "qwen"
server = Server("--device", "cpu", "--slots", "2", "--pool", "2048", "--retention", "none", "-n", "200", "--api-key", KEY, model=sys.argv[3])
ADDRESS = f"http://127.0.0.1:{server.port}"
QUESTION = "What is the weather in Paris? Use the tool."
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
FUNCTION = {"name": "get_weather", "description": "Returns the weather in a city.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}


class City(BaseModel):
    name: str
    country: str
    inhabitants: int


ABOUT = "Tell me about Paris as JSON with name, country and inhabitants."


class OpenAi(unittest.TestCase):
    """openai: chat completions, responses, parsing."""

    @classmethod
    def setUpClass(cls):
        import openai
        cls.openai = openai
        cls.client = openai.OpenAI(base_url=ADDRESS + "/v1", api_key=KEY, max_retries=0)

    @classmethod
    def tearDownClass(cls):
        cls.client.close()

    def test_chat(self):
        answer = self.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Say yes."}], max_tokens=20, n=2)
        self.assertEqual(len(answer.choices), 2)
        self.assertTrue(answer.choices[0].message.content)
        chunks = list(self.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Say yes."}], max_tokens=20,
                                                          stream=True, stream_options={"include_usage": True}))
        self.assertEqual("".join(c.choices[0].delta.content or "" for c in chunks if c.choices), answer.choices[0].message.content)
        self.assertGreater(chunks[-1].usage.completion_tokens, 0)

    def test_a_tool_is_called(self):
        messages = [{"role": "user", "content": QUESTION}]
        for choice in ("auto", "required", {"type": "function", "function": {"name": "get_weather"}}):
            message = self.client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], tool_choice=choice).choices[0].message
            [call] = message.tool_calls
            self.assertEqual(call.function.name, "get_weather")
            self.assertEqual(list(json.loads(call.function.arguments)), ["city"])
        result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."}
        answer = self.client.chat.completions.create(model=MODEL, messages=[*messages, message, result], tools=[TOOL], tool_choice="none")
        self.assertTrue(answer.choices[0].message.content)

    def test_parsed_answers_are_of_their_class(self):
        messages = [{"role": "user", "content": ABOUT}]
        city = self.client.chat.completions.parse(model=MODEL, messages=messages, response_format=City).choices[0].message.parsed
        self.assertIsInstance(city, City)
        answer = self.client.chat.completions.create(model=MODEL, messages=messages, response_format={"type": "json_object"})
        self.assertIsInstance(json.loads(answer.choices[0].message.content), dict)

    def test_responses(self):
        response = self.client.responses.create(model=MODEL, input="Say yes.", max_output_tokens=20)
        self.assertTrue(response.output_text)
        with self.client.responses.stream(model=MODEL, input="Say yes.", max_output_tokens=20) as stream:
            for _ in stream:
                pass
            self.assertEqual(stream.get_final_response().output_text, response.output_text)
        tool = {"type": "function", "strict": True, **FUNCTION}
        items = [{"role": "user", "content": QUESTION}]
        response = self.client.responses.create(model=MODEL, input=items, tools=[tool], tool_choice="required", store=False)
        [call] = response.output
        self.assertEqual((call.type, call.name, list(json.loads(call.arguments))), ("function_call", "get_weather", ["city"]))
        items += [call, {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}]
        self.assertTrue(self.client.responses.create(model=MODEL, input=items, tools=[tool], tool_choice="none").output_text)
        self.assertIsInstance(self.client.responses.parse(model=MODEL, input=ABOUT, text_format=City).output_parsed, City)

    def test_errors_have_their_classes(self):
        with self.assertRaises(self.openai.BadRequestError):
            self.client.embeddings.create(model=MODEL, input="a")
        with self.assertRaises(self.openai.NotFoundError):
            self.client.models.retrieve("other")


class Anthropic(unittest.TestCase):
    """anthropic: messages, tools, counting."""

    @classmethod
    def setUpClass(cls):
        import anthropic
        cls.client = anthropic.Anthropic(base_url=ADDRESS, api_key=KEY, max_retries=0)

    @classmethod
    def tearDownClass(cls):
        cls.client.close()

    def test_messages(self):
        fields = {"model": MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": "Say yes."}]}
        message = self.client.messages.create(**fields)
        with self.client.messages.stream(**fields) as stream:
            self.assertEqual("".join(stream.text_stream), message.content[0].text)
        counted = self.client.messages.count_tokens(model=MODEL, messages=fields["messages"])
        self.assertEqual(counted.input_tokens, message.usage.input_tokens + message.usage.cache_read_input_tokens)

    def test_a_tool_is_called(self):
        tool = {"name": "get_weather", "description": FUNCTION["description"], "input_schema": PARAMETERS}
        fields = {"model": MODEL, "max_tokens": 100, "tools": [tool]}
        messages = [{"role": "user", "content": QUESTION}]
        for choice in ("auto", "any", "tool"):
            choice = {"type": choice, **({"name": "get_weather"} if choice == "tool" else {})}
            message = self.client.messages.create(messages=messages, tool_choice=choice, **fields)
            self.assertEqual((message.stop_reason, message.content[-1].name, list(message.content[-1].input)),
                             ("tool_use", "get_weather", ["city"]))
        result = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": "Sunny"}
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        self.assertTrue(self.client.messages.create(messages=messages, **fields).content)


class LangChain(unittest.TestCase):
    def models(self):
        from langchain_anthropic import ChatAnthropic
        from langchain_openai import ChatOpenAI
        fields = {"model": MODEL, "api_key": KEY, "max_retries": 0, "max_tokens": 150}
        yield "openai", ChatOpenAI(base_url=ADDRESS + "/v1", **fields)
        yield "responses", ChatOpenAI(base_url=ADDRESS + "/v1", use_responses_api=True, **fields)
        yield "anthropic", ChatAnthropic(base_url=ADDRESS, **fields)

    def test_tools_and_structured_output(self):
        from langchain_core.tools import tool

        @tool
        def get_weather(city: str) -> str:
            """Returns the weather in a city."""
            return "Sunny in " + city

        for name, model in self.models():
            with self.subTest(name):
                for choice in ("auto", "any"):
                    [call] = model.bind_tools([get_weather], tool_choice=choice).invoke(QUESTION).tool_calls
                    self.assertEqual((call["name"], list(call["args"])), ("get_weather", ["city"]))
                self.assertIn("Sunny", get_weather.invoke(call["args"]))
                chunks = list(model.stream("Say yes."))
                self.assertTrue(chunks[0] + chunks[-1] if len(chunks) > 1 else chunks)
                for method in ("function_calling", "json_schema"):
                    self.assertIsInstance(model.with_structured_output(City, method=method).invoke(ABOUT), City, method)


class LiteLlm(unittest.TestCase):
    def test_chat_and_tools(self):
        import litellm
        for model, base in (("openai/" + MODEL, ADDRESS + "/v1"), ("anthropic/" + MODEL, ADDRESS)):
            with self.subTest(model):
                fields = {"model": model, "api_base": base, "api_key": KEY, "num_retries": 0, "max_tokens": 150}
                answer = litellm.completion(messages=[{"role": "user", "content": "Say yes."}], **fields)
                self.assertTrue(answer.choices[0].message.content)
                answer = litellm.completion(messages=[{"role": "user", "content": QUESTION}], tools=[TOOL], tool_choice="required", **fields)
                [call] = answer.choices[0].message.tool_calls
                self.assertEqual(list(json.loads(call.function.arguments)), ["city"])


class PydanticAi(unittest.TestCase):
    def agents(self, **fields):
        from pydantic_ai import Agent
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.anthropic import AnthropicProvider
        from pydantic_ai.providers.openai import OpenAIProvider
        openai = OpenAIProvider(base_url=ADDRESS + "/v1", api_key=KEY)
        for model in (OpenAIChatModel(MODEL, provider=openai), OpenAIResponsesModel(MODEL, provider=openai),
                      AnthropicModel(MODEL, provider=AnthropicProvider(base_url=ADDRESS, api_key=KEY))):
            yield type(model).__name__, Agent(model, model_settings={"max_tokens": 150}, **fields)

    def test_output_is_of_its_class(self):
        for name, agent in self.agents(output_type=City):
            with self.subTest(name):
                self.assertIsInstance(agent.run_sync(ABOUT).output, City)


class Agents(unittest.TestCase):
    """openai-agents, whose agents use responses."""

    def test_an_agent_ends_with_its_output_type(self):
        import agents
        from openai import AsyncOpenAI
        agents.set_tracing_disabled(True)
        agents.set_default_openai_client(AsyncOpenAI(base_url=ADDRESS + "/v1", api_key=KEY), use_for_tracing=False)
        agent = agents.Agent(name="a", instructions="Be brief.", model=MODEL, output_type=City)
        self.assertIsInstance(asyncio.run(agents.Runner.run(agent, ABOUT)).final_output, City)


if __name__ == "__main__":
    print(", ".join(f"{name} {version(name)}" for name in
                    ("openai", "anthropic", "langchain-openai", "langchain-anthropic", "litellm", "pydantic-ai-slim", "openai-agents")))
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]])
