"""Asks the manager of a job, as the commands and `notify_manager_preempt` do."""

import socket
from pathlib import Path

from varuna.morph.failures import in_short
from varuna.morph.journal import Over, read
from varuna.morph.protocol.messages import Answer, Ask, Message, read_to_agent, write
from varuna.morph.protocol.wire import Refused, Wire
from varuna.morph.run.job_folder import JobFolder, home_folder, saved_path

ANSWER_SECONDS = 10.0


def ask(code_dir: str, what: str, **facts: object) -> Answer:

    folder = JobFolder(saved_path(home_folder(), Path(code_dir).absolute()).with_suffix(""))
    contact = folder.read_contact()
    if contact is None:
        raise ValueError(f"no job was started with {Path(code_dir).absolute()} (name the folder: --code-dir)")
    question = Ask(contact.job, what, **facts)  # type: ignore[arg-type]  # the callers above name its fields
    try:
        return talk(contact.address, contact.port, bytes.fromhex(contact.secret), question)
    except (OSError, Refused) as error:
        for record in read(folder.journal):
            if isinstance(record, Over):
                how, reason = record.verdict.how, in_short(record.verdict.reason)
                raise ValueError(
                    f"{contact.job} is over: {how}: {reason}; logs in {contact.log_dir}"
                ) from None
        raise ValueError(
            f"the manager of {contact.job} does not answer at {contact.address}:{contact.port} ({error}); "
            f"if it was killed, `varuna run --resume --code_dir {code_dir}` takes the job up again"
        ) from None


def talk(address: str, port: int, secret: bytes, question: Message) -> Answer:
    wire = Wire(secret, calls=True)
    with socket.create_connection((address, port), timeout=ANSWER_SECONDS) as connection:
        connection.sendall(wire.greeting)
        asked = False
        while data := connection.recv(65536):
            for payload in wire.feed(data):
                answer = read_to_agent(payload)
                if isinstance(answer, Answer):
                    return answer
            if wire.greeted and not asked:
                connection.sendall(wire.pack(write(question)))
                asked = True
    raise ConnectionResetError("it hung up")
