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
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))
    assert Agent(model, output_type=NativeOutput(City)).run_sync(QUESTION).output.name
    Agent(model, tools=[weather]).run_sync(WEATHER)
    assert called


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


globals()[sys.argv[1]]()
