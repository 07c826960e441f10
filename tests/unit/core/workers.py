"""Jobs that a core has given to store workers, as they end: well, badly or late."""

from __future__ import annotations

from contents import Recipe
from surroundings import Surroundings

from kmesh.layout import TILE_BYTES, tiles
from kmesh_spand.core import events as ev
from kmesh_spand.core.mirrors import BaseFact, RecipeFacts


class Workers(Surroundings):
    """Every job ends when a test says so."""

    def copy_ends(self, job: int, ok: bool = True) -> None:
        """A copy is done, or failed."""
        copy, content = self.copies.pop(job)
        if ok:
            self._write(copy, content)
            self.send(ev.CopyDone(job, content))
        else:
            self.send(ev.CopyFailed(job))

    def verify_ends(self, job: int, answered: bool = True) -> None:
        """A verification has read what is there, or its worker died."""
        verify = self.verifies.pop(job)
        first = verify.offset // TILE_BYTES
        read = range(first, first + tiles(verify.length))
        good = all(self.memory.get((verify.slab, tile)) == verify.root for tile in read)
        if good and answered:
            self.flipped -= {(verify.slab, tile) for tile in read}
        facts = None
        if good and answered and verify.recipe:
            recipe = self.recipes.get(verify.root)
            good, facts = recipe is not None, recipe.facts if recipe else None
        self.send(ev.VerifyDone(job, good if answered else None, facts))

    def encode_ends(self, job: int, length: int = 1000, used: int = 1, *, ok: bool = True) -> None:
        """An encoding is done: a recipe over the first ``used`` bases, or nothing (0)."""
        encode = self.encodes.pop(job)
        bases = list(encode.bases)[:used]
        spoiled = not self._intact(encode.span)
        changed = [number for number, base in enumerate(bases) if not self._intact(base)]
        if not ok:
            self.send(ev.RecodeFailed(job))
        elif spoiled or changed:
            self.send(ev.EncodeSpoiled(job, spoiled, changed))
        elif not used:
            self.send(ev.NotEncoded(job, "a test says so"))
        else:
            self.made[job] = encode, length, list(range(len(bases)))
            self.send(ev.Encoded(job, length, range(len(bases))))

    def keep_ends(self, job: int, *, ok: bool = True) -> None:
        """A recipe was written, or could not be."""
        keep = self.keeps.pop(job)
        encode, _, used = self.made.pop(job)
        if not ok:
            self.send(ev.RecodeFailed(job))
            return
        self.content += 1
        bases = [encode.bases[number] for number in used]
        facts = [BaseFact(b.key, b.generation, b.root, b.tokens, b.position) for b in bases]
        span = encode.span
        self.recipes[self.content] = Recipe(span.root, RecipeFacts(span.length, span.root, facts))
        self._fill(keep.slab, keep.offset, keep.length, self.content)
        self.send(ev.RecipeKept(job, self.content))

    def densify_ends(self, job: int, *, ok: bool = True) -> None:
        """A recipe was decoded, or its worker died."""
        densify = self.densifies.pop(job)
        if not ok:
            self.send(ev.RecodeFailed(job))
            return
        good = self._intact(densify.mirror, *densify.bases)
        if good:
            assert self.recipes[densify.mirror.root].dense == densify.root
            self._fill(densify.slab, densify.offset, densify.length, densify.root)
        self.send(ev.Densified(job, good))

    def wipe_ends(self, job: int, ok: bool = True) -> None:
        """A slab was wiped, or could not be."""
        slab = self.wipes.pop(job)
        if ok:
            self.memory = {at: word for at, word in self.memory.items() if at[0] != slab}
            self.flipped = {at for at in self.flipped if at[0] != slab}
        self.send(ev.WipeDone(job, ok))

    def settle(self) -> None:
        """Let every job end well."""
        for job in list(self.wipes):
            self.wipe_ends(job)
        while self.copies or self.verifies or self.encodes or self.keeps or self.densifies:
            for job in list(self.encodes):
                self.encode_ends(job)
            for job in list(self.keeps):
                self.keep_ends(job)
            for job in list(self.densifies):
                self.densify_ends(job)
            for job in list(self.copies):
                self.copy_ends(job)
            for job in list(self.verifies):
                self.verify_ends(job)
