"""Which of a table's columns are a question and its answer, by their names in several languages: for hints, and for the
run YAML that `make new` writes. Rows are never read by a guess."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping

_QUESTIONS = (
    "prompt question questions query instruction input inputs user human ask request problem q task utterance "
    "frage fragen anweisung eingabe aufgabe anfrage benutzer pregunta instruccion instrucción entrada usuario "
    "pergunta instrução domanda istruzione utente vraag opdracht fråga pytanie otázka otazka soru kérdés "
    "вопрос запрос инструкция питання 问题 問題 问 提问 指令 输入 質問 入力 질문"
)
_ANSWERS = (
    "completion answer answers response responses output outputs reply assistant bot target solution a "
    "antwort antworten ausgabe lösung loesung erwiderung respuesta salida solución resposta saída risposta réponse "
    "reponse sortie antwoord uitvoer svar odpowiedź odpověď cevap yanıt válasz "
    "ответ вывод решение відповідь 回答 答案 答 输出 回复 出力 返答 答え 답변"
)
_TEXTS = (
    "text texts content document body article passage paragraph inhalt artikel dokument absatz texto texte testo tekst "
    "contenu contenido текст статья 文本 内容 正文 本文"
)


def guessed_columns(names: Collection[str]) -> dict[str, str]:
    """`data.columns` for columns of these names; empty where they say nothing."""
    asked = _first(names, _QUESTIONS)
    answered = _first([name for name in names if name != asked], _ANSWERS)
    if asked is not None and answered is not None:
        return {"prompt": asked, "completion": answered}
    text = _first(names, _TEXTS)
    return {"text": text} if text is not None and asked is None and answered is None else {}


def _first(names: Collection[str], words: str) -> str | None:
    """The column that has one of the words for its name, else the first with one among others (`user_question`)."""
    known = frozenset(words.split())
    whole = (name for name in names if name.strip().lower() in known)
    return next(whole, None) or next((name for name in names if not known.isdisjoint(_parts(name))), None)


def _parts(name: str) -> list[str]:
    return re.split(r"[\W_\d]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


def columns_setting(columns: Mapping[str, str]) -> str:
    """`data.columns={prompt: Frage, completion: Antwort}`."""
    pairs = (f"{known}: {_quoted(given)}" for known, given in columns.items())
    return f"data.columns={{{', '.join(pairs)}}}"


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[^\W\d][\w-]*", name) else json.dumps(name, ensure_ascii=False)
