"""Checks of the models: installation, intact files, and the alignment of the two vocabularies."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from omnidraft.config import Settings
from omnidraft.doctor.finding import Finding, ok, problem, warning
from omnidraft.errors import ModelUnknown
from omnidraft.models.weights_name import is_gguf
from omnidraft.progress import bar
from omnidraft.system import default_home

if TYPE_CHECKING:
    from omnidraft.models.catalog.install import Origin


def folder_of(name: str) -> Path | None:
    """Return the folder of an installed model, or None; no network access."""
    from omnidraft.models.catalog import store

    local = Path(name).expanduser()
    return local if local.is_dir() else store.installed(name.lower()) or store.installed(name)


def gguf_of(name: str) -> Path | None:
    """Return the GGUF file that llama.cpp would run; None where it is not on this machine. No network access."""
    from omnidraft.models.catalog import known_models, store

    if name.lower() in known_models.names():
        file = default_home() / "models" / f"{name.lower()}.gguf"
        return file if file.is_file() else None
    with suppress(ModelUnknown):
        return store.gguf_path(name)
    return None


def weights_bytes(folder: Path) -> int:
    """Return the size of the safetensors files that a model of this folder is loaded from."""
    files = [path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated")]
    return sum(path.stat().st_size for path in files)


def model(name: str) -> Finding:
    """Check that the model is installed, made from the catalog's file, and that every weight file is complete."""
    from omnidraft.models.catalog import known_models
    from omnidraft.models.catalog.install import read_origin
    from omnidraft.models.catalog.store import HUB_ID

    check, folder, local = f"model {name}", folder_of(name), Path(name).expanduser()
    if folder is None and is_gguf(local):
        return ok(check, f"{local} is there, converted when it is first used")
    if folder is None and (name.lower() in known_models.names() or HUB_ID.fullmatch(name)):
        return warning(check, "not on this machine; the first start fetches it", f"omnidraft models pull {name}")
    if folder is None:
        return problem(check, known_models.unknown_model_message(name), "correct models.target or models.drafter")
    advice = f"remove {folder} and run `omnidraft models pull {name}`"
    if broken := _broken_file(folder):
        return problem(check, broken, advice)
    made = read_origin(folder)
    if made and (expected := _other_than_catalog(name, made)):
        return problem(check, f"{folder} was made from {made.fingerprint}, the catalog names {expected}", advice)
    return ok(check, f"{folder}, {weights_bytes(folder) / 1e9:.2f} GB of weights")


def gguf(name: str) -> Finding:
    """Compare the file that llama.cpp runs with the catalog's sha256."""
    from omnidraft.files import sha256_of
    from omnidraft.models.catalog import known_models, store

    check = f"GGUF file of {name}"
    if name.lower() not in known_models.names():
        return ok(check, str(store.gguf_path(name)))
    if (file := gguf_of(name)) is None:
        return warning(check, "not on this machine; the first start fetches it", f"omnidraft models pull {name} --gguf")
    with bar(f"checksum of {file.name}: files", 1, transient=True):
        actual, expected = sha256_of(file), known_models.find(name).sha256
    if actual != expected:
        advice = f"remove {file} and run `omnidraft models pull {name} --gguf`"
        return problem(check, f"{file} has sha256 {actual}, the catalog names {expected}", advice)
    return ok(check, f"{file} is the catalog's")


def packed() -> Finding:
    """Compare the packed models, which every start maps unread, with their checksums."""
    from omnidraft import assembly
    from omnidraft.errors import ModelCorrupt
    from omnidraft.models.native.packed_file import PackedFile

    check, cache = "packed models", assembly.packed_cache()
    files = cache.files()
    with bar("checksums of packed models: files", len(files), transient=True) as advance:
        for path in files:
            try:
                PackedFile(path).verify()
            except (ModelCorrupt, OSError) as exc:
                return problem(check, str(exc), f"remove {path}; the next start packs the model anew")
            advance()
    size_gb = sum(path.stat().st_size for path in files) / 1e9
    return ok(check, f"{len(files)} files, {size_gb:.2f} GB, in {cache.folder} have the right checksums")


def alignment(settings: Settings) -> Finding:
    """Check that the alignment of a pair can be built, and that drafting can use it."""
    from omnidraft import assembly

    check = f"alignment of {settings.models.target}"
    if absent := _absent(settings):
        return warning(check, f"not built: {absent} is not on this machine", f"omnidraft models pull {absent}")
    built = assembly.vocabularies(settings).alignment
    share = built.num_direct / max(built.num_draft, 1)
    message = f"{built.num_direct:,} of {built.num_draft:,} draft tokens are one target token"
    if share < 0.1:
        return warning(check, message, "choose a drafter whose vocabulary has more in common with the target's")
    return ok(check, message)


def champion_fits(settings: Settings) -> Finding:
    """Check that the champion was trained with the installed models."""
    from omnidraft import assembly
    from omnidraft.errors import SnapshotNotFound

    check = f"champion's models of {settings.models.target}"
    if absent := _absent(settings):
        return warning(check, f"not compared: {absent} is not on this machine", f"omnidraft models pull {absent}")
    try:
        champion = assembly.existing_registry(settings).resolve("champion")
    except SnapshotNotFound:
        return ok(check, "there is no champion yet")
    ours, its = assembly.identity(settings, assembly.vocabularies(settings)), champion.manifest
    advice = "install the models it was learned with, or roll back to a version of these"
    compared = {
        "alignment": (its.alignment, ours.alignment),
        "drafter": (its.drafter_hash, ours.drafter_hash),
    }
    for what, (made, here) in compared.items():
        if made != here:
            message = f"version {champion.version} was made with {what} {made[:12]}, installed is {here[:12]}"
            return problem(check, message, advice)
    return ok(check, f"version {champion.version} has the alignment and the drafter that are installed")


def _absent(settings: Settings) -> str | None:
    """Return a model of the pair that is not installed, or None."""
    models = settings.models
    return next((name for name in (models.target, models.drafter) if folder_of(name) is None), None)


def _broken_file(folder: Path) -> str | None:
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file():
        return f"{folder} has no config.json"
    if not files:
        return f"{folder} has no weights (*.safetensors)"
    for path in files:
        try:
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError) as exc:  # the header names sizes: a file cut short shows here
            return f"{path} cannot be read: {exc}"
    return None


def _other_than_catalog(name: str, made: "Origin") -> str | None:
    """Return the catalog's sha256 if the folder was made from another file, else None."""
    from omnidraft.models.catalog import known_models

    if name.lower() not in known_models.names() or made.source != "wheels":
        return None
    expected = known_models.find(name).sha256
    return None if made.fingerprint == expected else expected
