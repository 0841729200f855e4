"""Typed answers and tools of the frameworks that people build with; the name of one is the argument."""

import os
import sys

from pydantic import BaseModel

MODEL, URL = os.environ["MODEL"], os.environ["OPENAI_BASE_URL"]


class City(BaseModel):
    name: str
    population: int


QUESTION = "Tell about Rome, Italy: its name and its population."


def weather(city: str) -> str:
    """Tell the weather of a city."""
    called.append(city)
    return f"It is sunny in {city}."


called: list[str] = []
WEATHER = "What is the weather in Rome? Use the tool."


def pydantic_ai() -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))
        assert Agent(model, output_type=NativeOutput(City)).run_sync(QUESTION).output.name
        assert Agent(model, output_type=City).run_sync(QUESTION).output.name  # by a tool
        Agent(model, tools=[weather], model_settings={"temperature": 0}).run_sync(WEATHER)
        assert called
        called.clear()


def pydantic_ai_anthropic() -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    url = os.environ["ANTHROPIC_BASE_URL"]
    model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=url, api_key="none"))
    assert Agent(model).run_sync("Say hi.").output


def instructor() -> None:
    import instructor as library

    client = library.from_provider(f"openai/{MODEL}", base_url=URL, api_key="none", mode=library.Mode.JSON_SCHEMA)
    assert client.create(response_model=City, messages=[{"role": "user", "content": QUESTION}]).name


def openai_agents() -> None:
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    agent = Agent("helper", model=MODEL, tools=[function_tool(weather)])
    Runner.run_sync(agent, WEATHER, max_turns=4)
    assert called
    assert Runner.run_sync(Agent("typed", model=MODEL, output_type=City), QUESTION).final_output.name


def smolagents() -> None:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    @tool
    def forecast(city: str) -> str:
        """Tell the weather of a city.

        Args:
            city: its name.
        """
        return weather(city)

    model = OpenAIModel(MODEL, api_base=URL, api_key="none")
    ToolCallingAgent([forecast], model=model, max_steps=2).run(WEATHER)
    assert called


def litellm() -> None:
    import litellm as library

    for provider in ("openai", "hosted_vllm"):
        answer = library.completion(
            f"{provider}/{MODEL}", messages=[{"role": "user", "content": "Say hi."}], api_base=URL, api_key="none",
            reasoning_effort="low", drop_params=False, allowed_openai_params=["reasoning_effort"],
        )  # fmt: skip
        assert answer.choices[0].message.content


def langchain() -> None:
    from langchain_anthropic import ChatAnthropic
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, temperature=0)
    assert model.with_structured_output(City, method="json_schema").invoke(QUESTION).name
    assert model.bind_tools([tool(weather)]).invoke(WEATHER).tool_calls
    assert "".join(part.content for part in model.stream("Say hi."))
    assert ChatAnthropic(model=MODEL, base_url=os.environ["ANTHROPIC_BASE_URL"]).invoke("Say hi.").content


def llama_index() -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        MODEL, api_base=URL, api_key="none", is_chat_model=True, should_use_structured_outputs=True, timeout=600
    )
    assert model.chat([ChatMessage("Say hi.")]).message.content
    assert model.as_structured_llm(City).chat([ChatMessage(QUESTION)]).raw.name


def dspy() -> None:
    import dspy as library

    class Telling(library.Signature):
        """Tell about a city."""

        question: str = library.InputField()
        city: str = library.OutputField()
        population: int = library.OutputField()

    library.configure(lm=library.LM(f"openai/{MODEL}", api_base=URL, api_key="none", cache=False, temperature=0))
    assert library.Predict("question -> answer")(question="What is 2 + 2? One word.").answer
    with library.context(adapter=library.JSONAdapter()):
        assert library.Predict(Telling)(question=QUESTION).population


def haystack() -> None:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function
    from haystack.utils import Secret

    def forecast(city: str) -> str:
        """Tell the weather of a city."""
        return weather(city)

    def ask(text: str, **settings: object) -> ChatMessage:
        model = OpenAIChatGenerator(Secret.from_token("none"), MODEL, api_base_url=URL, **settings)
        return model.run([ChatMessage.from_user(text)])["replies"][0]

    chunks: list[object] = []
    assert ask("Say hi.", streaming_callback=chunks.append).text
    assert chunks
    assert City.model_validate_json(ask(QUESTION, generation_kwargs={"response_format": City}).text).name
    forced = {"tool_choice": "required"}
    calls = ask(WEATHER, tools=[create_tool_from_function(forecast)], generation_kwargs=forced).tool_calls
    assert calls[0].arguments["city"]


def outlines() -> None:
    from typing import Literal

    import openai
    import outlines as library
    from outlines.types import CFG, regex

    client = openai.OpenAI(base_url=URL, api_key="none")
    for made in (library.from_openai, library.from_vllm, library.from_sglang):
        assert City.model_validate_json(made(client, MODEL)(QUESTION, City)).name
    for made in (library.from_vllm, library.from_sglang):
        model = made(client, MODEL)
        assert model("Which colour has grass?", Literal["red", "green"]) in ("red", "green")
        assert len(model("Tell a number.", regex("[0-9]{3}"))) == 3
    assert library.from_vllm(client, MODEL)("Yes or no?", CFG('start: "yes" | "no"')) in ("yes", "no")


def guidance() -> None:
    import guidance as library
    from guidance.models.experimental import VLLMModel
    from pydantic import ConfigDict, Field

    class Town(BaseModel):
        """One whose grammar, which guidance writes, has an end."""

        model_config = ConfigDict(extra="forbid")
        name: str = Field(max_length=20)
        population: int = Field(ge=0, le=100_000_000)

    for model in (
        VLLMModel(MODEL, base_url=URL, api_key="none"),
        library.models.OpenAI(MODEL, base_url=URL, api_key="none"),
    ):
        with library.user():
            model += QUESTION
        with library.assistant():
            model += library.json("city", schema=Town, temperature=0)
        assert Town.model_validate_json(model["city"]).name
    model = VLLMModel(MODEL, base_url=URL, api_key="none")
    with library.user():
        model += "Which colour has grass?"
    with library.assistant():
        model += library.select(["red", "green"], name="colour")
    assert model["colour"] in ("red", "green")


def inspect_ai() -> None:
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import get_model
    from inspect_ai.scorer import choice, includes
    from inspect_ai.solver import generate, multiple_choice

    sums = [Sample(f"What is {one} + {one}? Answer with the number only.", target=str(2 * one)) for one in range(1, 5)]
    picks = [Sample("The capital of France is", ["Paris", "Rome"], "A"), Sample("Grass is", ["blue", "green"], "B")]
    tasks = [
        Task(sums, solver=generate(), scorer=includes()),
        Task(picks, solver=multiple_choice(), scorer=choice()),
    ]
    anthropic = os.environ["ANTHROPIC_BASE_URL"]
    for provider, url in (("openai-api/here", URL), ("openai", URL), ("vllm", URL), ("anthropic", anthropic)):
        model = get_model(f"{provider}/{MODEL}", base_url=url, api_key="none")
        for log in eval(tasks, model=model, display="none", log_dir=os.environ["HOME"]):
            assert log.status == "success", log.error
            assert log.results.scores[0].metrics["accuracy"].value > 0


globals()[sys.argv[1]]()
