"""Pictures by popular clients: each shows the model what a plain request shows it. A fake engine, whose answer says what it
saw, and a tiny random model that sees, whose answer is the same to the same prompt."""
import base64
import io
import json
import re
import sys

import anthropic
import ollama
import openai
import pytest
import requests
from conftest import KEY, MODEL, ROOT, run_daemon
from langchain_core.messages import HumanMessage
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from PIL import Image

sys.path.insert(0, str(ROOT / "tests/python"))
TEXT = "What is it?"
HEADERS = {"Authorization": f"Bearer {KEY}"}


def picture(form):
    out = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").resize((48, 24)).save(out, form, **({"lossless": True} if form == "WEBP" else {}))
    return out.getvalue()


PNG = picture("PNG")
BASE64 = base64.b64encode(PNG).decode()
ADDRESS = "data:image/png;base64," + BASE64
PART, WORDS = {"type": "image_url", "image_url": {"url": ADDRESS}}, {"type": "text", "text": TEXT}
LIMITS = {"max_tokens": 40, "temperature": 0}


@pytest.fixture(scope="session", params=["fake", "model"])
def seeing(request, tmp_path_factory):
    if request.param == "fake":
        yield from run_daemon("--api-key", KEY, binary="server/keepd-fake", env={"KEEPD_FAKE_PICTURES": "1"})
    else:
        from vision_model import write_model
        directory = write_model(tmp_path_factory.mktemp("eyes"))
        yield from run_daemon("--api-key", KEY, "--model", str(directory), "--served-model-name", MODEL, binary="server/keepd")


def ask(daemon, path, **body):
    answer = requests.post(daemon.url + path, json=body, headers=HEADERS, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.fixture(scope="session")
def expected(seeing):
    """The text of an answer to the picture and the words."""
    text = ask(seeing, "/v1/chat/completions", messages=[{"role": "user", "content": [PART, WORDS]}], **LIMITS).json()["choices"][0]["message"]["content"]
    blind = ask(seeing, "/v1/chat/completions", messages=[{"role": "user", "content": TEXT}], **LIMITS).json()["choices"][0]["message"]["content"]
    assert text != blind and (blind != TEXT or re.fullmatch(r"\[48x24, .*\]" + re.escape(TEXT), text))
    return text


def by_openai(daemon):
    client = openai.OpenAI(base_url=f"{daemon.url}/v1", api_key=KEY, max_retries=0)
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [PART, WORDS]}], **LIMITS).choices[0].message.content


def by_openai_streaming(daemon):
    client = openai.OpenAI(base_url=f"{daemon.url}/v1", api_key=KEY, max_retries=0)
    chunks = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [PART, WORDS]}], stream=True, **LIMITS)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def by_responses(daemon):
    client = openai.OpenAI(base_url=f"{daemon.url}/v1", api_key=KEY, max_retries=0)
    content = [{"type": "input_image", "image_url": ADDRESS, "detail": "auto"}, {"type": "input_text", "text": TEXT}]
    return client.responses.create(model=MODEL, input=[{"role": "user", "content": content}], max_output_tokens=40, temperature=0).output_text


def by_anthropic(daemon):
    client = anthropic.Anthropic(base_url=daemon.url, api_key=KEY, max_retries=0)
    source = {"type": "base64", "media_type": "image/png", "data": BASE64}
    message = client.messages.create(model=MODEL, max_tokens=40, messages=[{"role": "user", "content": [{"type": "image", "source": source}, WORDS]}],
                                     extra_body={"temperature": 0})
    return message.content[0].text


def by_langchain(daemon):
    model = ChatOpenAI(model=MODEL, base_url=f"{daemon.url}/v1", api_key=KEY, max_retries=0, **LIMITS)
    return model.invoke([HumanMessage([PART, WORDS])]).content


def by_langchain_blocks(daemon):
    """In the form that LangChain has for all its providers."""
    model = ChatOpenAI(model=MODEL, base_url=f"{daemon.url}/v1", api_key=KEY, max_retries=0, **LIMITS)
    return model.invoke([HumanMessage([{"type": "image", "base64": BASE64, "mime_type": "image/png"}, WORDS])]).content


def by_ollama(daemon):
    client = ollama.Client(host=daemon.url, headers=HEADERS)
    return client.chat(MODEL, [{"role": "user", "content": TEXT, "images": [PNG]}], options={"temperature": 0, "num_predict": 40}).message.content


def by_ollama_generate(daemon):
    client = ollama.Client(host=daemon.url, headers=HEADERS)
    return client.generate(MODEL, TEXT, images=[PNG], options={"temperature": 0, "num_predict": 40}).response


def by_open_webui(daemon):
    """The body that Open WebUI sends to servers of OpenAI's API."""
    answer = ask(daemon, "/v1/chat/completions", stream=True, model=MODEL, messages=[{"role": "user", "content": [PART, WORDS]}],
                 stream_options={"include_usage": True}, user={"name": "a", "id": "1", "email": "a@b", "role": "admin"}, **LIMITS)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert events[-1]["usage"]["prompt_tokens"] > 0
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


def by_open_webui_of_ollama(daemon):
    """The body that Open WebUI sends to an Ollama: addresses are cut to their base64."""
    answer = ask(daemon, "/api/chat", stream=True, model=MODEL + ":latest", keep_alive="5m", options={"temperature": 0, "num_predict": 40},
                 messages=[{"role": "user", "content": TEXT, "images": [ADDRESS.split(",")[1]]}])
    return "".join(json.loads(line)["message"]["content"] for line in answer.text.splitlines())


@pytest.mark.parametrize("client", [by_openai, by_openai_streaming, by_responses, by_anthropic, by_langchain, by_langchain_blocks, by_ollama,
                                    by_ollama_generate, by_open_webui, by_open_webui_of_ollama], ids=lambda c: c.__name__)
def test_the_model_sees_what_a_plain_request_shows(seeing, expected, client):
    assert client(seeing) == expected


def test_langchain_of_ollama(seeing):
    """This client puts a line break in front of each text."""
    model = ChatOllama(model=MODEL, base_url=seeing.url, client_kwargs={"headers": HEADERS}, temperature=0, num_predict=40)
    messages = [{"role": "user", "content": [PART, {"type": "text", "text": "\n" + TEXT}]}]
    plain = ask(seeing, "/v1/chat/completions", messages=messages, **LIMITS).json()["choices"][0]["message"]["content"]
    assert model.invoke([HumanMessage([PART, WORDS])]).content == plain


def test_clients_read_why_a_picture_is_refused(seeing):
    bad = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    with pytest.raises(openai.BadRequestError, match="no picture") as caught:
        openai.OpenAI(base_url=f"{seeing.url}/v1", api_key=KEY, max_retries=0).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": [WORDS, bad]}])
    assert caught.value.param == "messages[0].content[1].image_url.url"
    with pytest.raises(ollama.ResponseError, match="no picture"):
        ollama.Client(host=seeing.url, headers=HEADERS).chat(MODEL, [{"role": "user", "content": TEXT, "images": [b"hello"]}])


def test_the_list_of_capabilities(seeing):
    assert "vision" in ollama.Client(host=seeing.url, headers=HEADERS).show(MODEL).capabilities


@pytest.mark.parametrize("form", ["JPEG", "WEBP", "GIF", "PNG"])
def test_forms_of_files(seeing, expected, form):
    address = f"data:image/{form.lower()};base64,{base64.b64encode(picture(form)).decode()}"
    client = openai.OpenAI(base_url=f"{seeing.url}/v1", api_key=KEY, max_retries=0)
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}, WORDS]}],
                                            **LIMITS)
    assert answer.usage.prompt_tokens > 10 and (form == "JPEG" or answer.choices[0].message.content == expected)
