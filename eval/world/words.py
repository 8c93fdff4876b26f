"""The word lists that the fictional encyclopedia's names and values are composed of.

Every list is a product of two short syllable tables or a plain tuple, so that the whole vocabulary is closed, small and the
same on every machine.
"""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _compose(starts: str, ends: str) -> tuple[str, ...]:
    return tuple(start + end for start in starts.split() for end in ends.split())


_GIVEN = "Mar El Sel Tal Or Vel Lin Ros Bri Cal Dor Fen Gil Hes Is Jun Kes Nor Pel Wil"
GIVEN_SHE = _compose(_GIVEN, "a ia ena ara ise elle ine etta ova wyn")
GIVEN_HE = _compose(_GIVEN, "an or ek us on ard imir ik eth olt")
FAMILY = _compose(
    "Quil Har Bram Thorn Wex Lund Mor Pren Ash Bel Crev Dun Eck Fal Grim Hol "
    "Ing Jar Kel Lam Mund Nax Osk Pim Rath Sted Tarn Ulv Vost Wynd Yar Zell",
    "ley er by man sen ow ick ard ens ing et ald ane oft une ish",
)

TOWN_FRONT = _words(
    "Port Old New Upper Lower East West North South Great Little Saint Fort Mount Lake Castle Bishop King Long High "
    "Stone White Black Cold"
)
TOWN_ROOT = _compose(
    "Aver Bar Cran Dal Ember Frost Gar Heath Ivel Kirk Lang Mil Nether Oak Pen Raven Shel Tan Under Vint Wal Yarn Zan Brook",
    "ford mere wick holm dale haven stead bury",
)
FIRM_ROOT = _compose(
    "Orin Tel Vant Sol Quor Lex Mir Nov Pyr Rad Syn Trel Umb Ver Xan Zeph Ard Bex Cor Dyn Elt Fluv Gant Hyd",
    "ex ano ium ara ica eon ux ella",
)
FIRM_NOUN = _words(
    "Labs Works Mills Motors Foods Glass Steel Press Lines Partners Brothers Textiles Chemicals Shipping Optics "
    "Mining Timber Tools Energy Systems Trading Paper Ceramics Foundry"
)
CLUB_ROOT = _compose(
    "Pike Stag Otter Falcon Lynx Badger Heron Viper Condor Marten Bison Walrus Kestrel Jackal Mantis Osprey Puma Raccoon "
    "Salmon Tiger Urchin Vulture Weasel Zebra",
    "hill gate side brook",
)
CLUB_NOUN = _words(
    "Rovers United Rangers Athletic Wanderers Albion County Harriers Comets Royals Dynamos Pilots Miners Sailors "
    "Rockets Giants Saints Pirates Archers Knights Hornets Lancers Monarchs Scouts"
)
TITLE_FRONT = _words(
    "Silent Burning Broken Golden Hidden Distant Frozen Crimson Hollow Gentle Savage Secret Silver Velvet Wandering "
    "Weary Bitter Bright Crooked Faded Fearless Forgotten Humble Iron Lonely Lost Midnight Patient Quiet Restless "
    "Rising Sacred Scarlet Shattered Sleeping Solemn Stolen Stormy Stubborn Sunken Tender Thirsty Tired Twisted "
    "Unseen Vanished Vivid Wicked"
)
TITLE_NOUN = _words(
    "Harbor Garden Mirror River Winter Orchard Lantern Letter Mountain Kingdom Bridge Clock Crown Desert Door Echo "
    "Engine Feather Forest Fountain Ghost Hunter Island Journey Ladder Lighthouse Meadow Moon Morning Ocean Palace "
    "Promise Shadow Shore Signal Soldier Song Stranger Summer Thunder Tower Traveler Valley Voyage Widow Window "
    "Witness Wolf"
)
WORK_FRONT = _words(
    "Portrait Study Legend Ballad Hymn Dream Dance Tale Map Memory Vision Lament Elegy Rhapsody Chronicle Fable "
    "Sonata Sketch Riddle Prayer Story Vigil Feast Parade"
)

TRADE = _words("painter lawyer surgeon baker pilot engineer poet farmer singer chemist judge sailor")
INSTRUMENT = _words("cello flute harp violin trumpet piano oboe banjo organ lute clarinet guitar drum viola tuba zither")
GOODS = _words("clocks carpets lenses boots candles bicycles cheese rope pianos tiles umbrellas kettles maps paint soap gloves")
COLOUR = _words("red blue green yellow purple orange black white brown gray pink gold silver crimson teal maroon")
RIVER = _compose("Ald Brin Carr Drav Elm Isk Lorn Meth", "a en ow us")
THEME = _words("war love hunger exile music justice grief childhood hope revenge faith friendship travel silence greed courage")
YEARS = tuple(str(year) for year in range(1900, 2000))
COUNTS = tuple(str(count) for count in range(2, 62))
