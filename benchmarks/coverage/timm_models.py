"""At least one model of every family of timm, the smallest that has the family's parts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.coverage.entry import Absent, Built, Entry
from npu_cli.extras import import_torchvision

__all__ = ["entries"]

_SIDE = 128
_SIDES = {
    "deepseek_vit_412m": 224,
    "bat_resnext26ts": 256,
    "eca_halonext26ts": 256,
}  # what does not divide the usual one into patches
# One line for each module of timm; several models where a module holds several families.
_MODELS = """
beit_base_patch16_224 beitv2_base_patch16_224
botnet26t_256 eca_halonext26ts lambda_resnet26t
gernet_s repvgg_a0 bat_resnext26ts gcresnext26ts mobileone_s0 resnet50_clip
cait_xxs24_224
coat_tiny coat_lite_tiny
convit_tiny
convmixer_1024_20_ks9_p14
convnext_atto convnextv2_atto convnext_atto_rms
cpubone_nano
crossvit_tiny_240
csatv2
cspresnet50 cs3darknet_s cs3darknet_focus_s
cspnext_tiny
davit_tiny
deepseek_vit_412m
deit_tiny_patch16_224 deit_tiny_distilled_patch16_224 deit3_small_patch16_224
densenet121
dla34 dla60_res2net
dpn48b
edgenext_xx_small
efficientformer_l1
efficientformerv2_s0
efficientnet_b0 tf_efficientnetv2_b0 mnasnet_small fbnetc_100 mixnet_s spnasnet_100 tinynet_e efficientnet_cc_b0_4e
efficientnet_b0_gn mobilenet_edgetpu_v2_xs
efficientvim_m1
efficientvit_b0
efficientvit_m0
eva02_tiny_patch14_224 vit_pe_core_tiny_patch16_384 vit_small_patch16_dinov3
fasternet_t0
fastvit_t8
focalnet_tiny_srf
gcvit_xxtiny
gemma4_vit_167m
ghostnet_050 ghostnetv2_100 ghostnetv3_050
hardcorenas_a
hgnet_tiny hgnetv2_b0
hiera_tiny_224
sam2_hiera_tiny
hrnet_w18_small
iformer_t
inception_next_atto
inception_resnet_v2
inception_v3
inception_v4
lcnetv2_small
levit_128s levit_conv_128s
lowformer_b0
mambaout_femto
coatnet_pico_rw_224 maxvit_pico_rw_256 coatnext_nano_rw_224
poolformer_s12 convformer_s18 caformer_s18
mixer_s32_224 gmlp_ti16_224 resmlp_12_224 gmixer_12_224
mobilenetv3_small_050 mobilenetv4_conv_small_035 mobilenetv4_hybrid_medium lcnet_050 fbnetv3_b
mobilenetv5_300m
mobilevit_xxs mobilevitv2_050
mvitv2_tiny
naflexvit_base_patch16_gap
nasnetalarge
nest_tiny
nextvit_small
nf_resnet26 nf_regnet_b0 eca_nfnet_l0 dm_nfnet_f0
pit_ti_224
pnasnet5large
pvt_v2_b0
qwen3_vit_88m
rdnet_tiny
regnetx_002 regnety_002 regnetz_005
repghostnet_050
repvit_m0_9
res2net50_26w_4s
resnest14d
resnet10t resnet18 ecaresnet26t seresnet18 resnetblur18 resnetaa50d resnet33ts resnetrs50
resnetv2_18 resnetv2_50x1_bit
rexnet_100
selecsls42
legacy_seresnet18
sequencer2d_s
shvit_s1
skresnet18
starnet_s050
swiftformer_xs
swin_tiny_patch4_window7_224 swin_s3_tiny_224
swinv2_tiny_window8_256
swinv2_cr_tiny_224
tiny_vit_5m_224
tnt_s_patch16_224
tresnet_m
twins_pcpvt_small twins_svt_small
vgg11 vgg11_bn
visformer_tiny
vit_tiny_patch16_224 vit_small_patch14_dinov2 vit_small_patch14_reg4_dinov2 flexivit_small aimv2_large_patch14_224
vit_base_patch16_siglip_224 vit_base_patch16_clip_224 vit_wee_patch16_reg1_gap_256 vit_so150m_patch16_reg4_map_256
vit_small_r26_s32_224
vit_relpos_small_patch16_224 vit_srelpos_small_patch16_224
samvit_base_patch16_224
vitamin_small_224
volo_d1_224
ese_vovnet19b_slim
legacy_xception
xception41
xcit_nano_12_p16_224
"""


def entries() -> Iterator[Entry]:
    for name in _MODELS.split():
        yield Entry(f"timm/{name}", "classification", partial(_build, name), classes=True)


def _build(name: str) -> Built:
    import_torchvision()  # timm imports it, and cannot where its operators do not fit this torch
    import timm

    if not timm.is_model(name):
        raise Absent(f"timm {timm.__version__} has no model '{name}'")
    module, side = _smallest(timm, name)
    return Built(module, (torch.randn(1, 3, side, side),))


def _smallest(timm: Any, name: str) -> tuple[torch.nn.Module, int]:
    """The model for the smallest image that it can be built for, and the side of that image."""
    config = timm.get_pretrained_cfg(name)
    fixed = config is not None and config.fixed_input_size
    if not fixed:
        return timm.create_model(name, pretrained=False), _SIDES.get(name, _SIDE)
    return timm.create_model(name, pretrained=False), config.input_size[-1]
