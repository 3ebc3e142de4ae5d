"""flash_attn.layers.patch_embed: an image as a sequence of projected patches."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from flashtile import modules


class PatchEmbed(nn.Module):
    """Cuts images into patches and projects each by a linear layer, `proj`, and a norm, `norm`.

    Args:
        img_size: height and width of the images, an int for squares.
        patch_size: of the patches, likewise; divides img_size.
        in_chans: channels of the images.
        embed_dim: of the result.
        norm_layer: makes a norm of embed_dim; None for none.
        flatten: the patches are one dimension of the result, row after row, else two.
        bias: the projection has a bias.
        fused_bias_fc: the projection is a `flashtile.modules.FusedDense`.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        norm_layer: Callable[[int], nn.Module] | None = None,
        flatten: bool = True,
        bias: bool = True,
        fused_bias_fc: bool = False,
    ) -> None:
        super().__init__()
        self.img_size = _pair(img_size)
        self.patch_size = _pair(patch_size)
        self.grid_size = (self.img_size[0] // self.patch_size[0], self.img_size[1] // self.patch_size[1])
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.flatten = flatten
        layer = modules.FusedDense if fused_bias_fc else nn.Linear
        self.proj = layer(in_chans * self.patch_size[0] * self.patch_size[1], embed_dim, bias=bias)
        self.norm = nn.Identity() if norm_layer is None else norm_layer(embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, in_chans, height, width]` -> `[batch, patches, embed_dim]`, or `[batch, rows, columns, embed_dim]`.

        The elements of a patch come in the order (channel, row, column).
        """
        if x.dim() != 4 or tuple(x.shape[2:]) != self.img_size:
            raise ValueError(
                f"x: expected images [batch, in_chans, {self.img_size[0]}, {self.img_size[1]}], got {list(x.shape)}; "
                "resize them, or make the layer with their img_size"
            )
        # [B, C, rows, height, columns, width] -> [B, rows, columns, C · height · width]
        cut = x.unflatten(3, (self.grid_size[1], self.patch_size[1])).unflatten(
            2, (self.grid_size[0], self.patch_size[0])
        )
        patches = self.proj(cut.permute(0, 2, 4, 1, 3, 5).flatten(3))
        return self.norm(patches.flatten(1, 2) if self.flatten else patches)


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    height, width = (size, size) if isinstance(size, int) else size
    return height, width
