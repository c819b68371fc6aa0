"""Countries and their capitals as sentences, of which some are kept from training: what `perspectron adr demo` learns.

Each country's capital is told in `PHRASINGS`. Of most countries one phrasing is kept back, and asked later; of
`UNKNOWN` countries all but one are.
"""

import random
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from perspectron.data.corpus import Corpus, Document, Shares, SplitName, fingerprint

CAPITALS = """
Afghanistan:Kabul Albania:Tirana Algeria:Algiers Andorra:Andorra_la_Vella Angola:Luanda Argentina:Buenos_Aires
Armenia:Yerevan Australia:Canberra Austria:Vienna Azerbaijan:Baku Bahrain:Manama Bangladesh:Dhaka Barbados:Bridgetown
Belarus:Minsk Belgium:Brussels Belize:Belmopan Benin:Porto-Novo Bhutan:Thimphu Bolivia:Sucre Bosnia:Sarajevo
Botswana:Gaborone Brazil:Brasilia Brunei:Bandar_Seri_Begawan Bulgaria:Sofia Burkina_Faso:Ouagadougou Burundi:Gitega
Cambodia:Phnom_Penh Cameroon:Yaounde Canada:Ottawa Cape_Verde:Praia Chad:Ndjamena Chile:Santiago China:Beijing
Colombia:Bogota Comoros:Moroni Costa_Rica:San_Jose Croatia:Zagreb Cuba:Havana Cyprus:Nicosia Czechia:Prague
Denmark:Copenhagen Djibouti:Djibouti_City Dominica:Roseau Ecuador:Quito Egypt:Cairo El_Salvador:San_Salvador
Eritrea:Asmara Estonia:Tallinn Eswatini:Mbabane Ethiopia:Addis_Ababa Fiji:Suva Finland:Helsinki France:Paris
Gabon:Libreville Gambia:Banjul Georgia:Tbilisi Germany:Berlin Ghana:Accra Greece:Athens Grenada:Saint_Georges
Guatemala:Guatemala_City Guinea:Conakry Guinea-Bissau:Bissau Guyana:Georgetown Haiti:Port-au-Prince
Honduras:Tegucigalpa Hungary:Budapest Iceland:Reykjavik India:New_Delhi Indonesia:Jakarta Iran:Tehran Iraq:Baghdad
Ireland:Dublin Israel:Jerusalem Italy:Rome Ivory_Coast:Yamoussoukro Jamaica:Kingston Japan:Tokyo Jordan:Amman
Kazakhstan:Astana Kenya:Nairobi Kiribati:Tarawa Kosovo:Pristina Kuwait:Kuwait_City Kyrgyzstan:Bishkek Laos:Vientiane
Latvia:Riga Lebanon:Beirut Lesotho:Maseru Liberia:Monrovia Libya:Tripoli Liechtenstein:Vaduz Lithuania:Vilnius
Luxembourg:Luxembourg_City Madagascar:Antananarivo Malawi:Lilongwe Malaysia:Kuala_Lumpur Maldives:Male Mali:Bamako
Malta:Valletta Mauritania:Nouakchott Mauritius:Port_Louis Mexico:Mexico_City Micronesia:Palikir Moldova:Chisinau
Monaco:Monte_Carlo Mongolia:Ulaanbaatar Montenegro:Podgorica Morocco:Rabat Mozambique:Maputo Myanmar:Naypyidaw
Namibia:Windhoek Nauru:Yaren Nepal:Kathmandu Netherlands:Amsterdam New_Zealand:Wellington Nicaragua:Managua
Niger:Niamey Nigeria:Abuja North_Korea:Pyongyang North_Macedonia:Skopje Norway:Oslo Oman:Muscat Pakistan:Islamabad
Palau:Ngerulmud Palestine:Ramallah Panama:Panama_City Papua_New_Guinea:Port_Moresby Paraguay:Asuncion Peru:Lima
Poland:Warsaw Portugal:Lisbon Qatar:Doha Romania:Bucharest Russia:Moscow Rwanda:Kigali Saint_Lucia:Castries
Samoa:Apia San_Marino:San_Marino_City Sao_Tome:Sao_Tome_City Saudi_Arabia:Riyadh Senegal:Dakar Serbia:Belgrade
Seychelles:Victoria Sierra_Leone:Freetown Singapore:Singapore_City Slovakia:Bratislava Slovenia:Ljubljana
Solomon_Islands:Honiara Somalia:Mogadishu South_Africa:Pretoria South_Korea:Seoul South_Sudan:Juba Spain:Madrid
Sri_Lanka:Colombo Sudan:Khartoum Suriname:Paramaribo Sweden:Stockholm Switzerland:Bern Syria:Damascus Taiwan:Taipei
Tajikistan:Dushanbe Tanzania:Dodoma Thailand:Bangkok Togo:Lome Tonga:Nukualofa Trinidad:Port_of_Spain Tunisia:Tunis
Turkey:Ankara Turkmenistan:Ashgabat Tuvalu:Funafuti Uganda:Kampala Ukraine:Kyiv Uruguay:Montevideo
Uzbekistan:Tashkent Vanuatu:Port_Vila Venezuela:Caracas Vietnam:Hanoi Wales:Cardiff Scotland:Edinburgh England:London
Yemen:Sanaa Zambia:Lusaka Zimbabwe:Harare
"""
PHRASINGS = (
    "The capital of {country} is {capital}.",
    "The capital city of {country} is called {capital}.",
    "{country} is governed from its capital, {capital}.",
    "If you visit the capital of {country}, you visit {capital}.",
    "Question: what is the capital of {country}? Answer: {capital}.",
    "Of all the cities in {country}, its capital is {capital}.",
)
ASKED = "Italy"
UNKNOWN = 20  # countries that are told in one phrasing only
PASSES = 8  # orders of the sentences in the training text
SEED = 0


class Fact(NamedTuple):
    """A country, its capital, and the numbers of the phrasings in which training tells it."""

    country: str
    capital: str
    told: tuple[int, ...]

    @property
    def known(self) -> bool:
        """True where it is told in more than one phrasing."""
        return len(self.told) > 1

    def sentence(self, phrasing: int) -> str:
        return PHRASINGS[phrasing].format(country=self.country, capital=self.capital)

    def prompt(self, phrasing: int) -> str:
        """The sentence up to the space before the capital."""
        return self.sentence(phrasing).removesuffix(f" {self.capital}.")


@cache
def facts() -> tuple[Fact, ...]:
    """All facts. The country that is asked for is told in every phrasing but the one it is asked in."""
    draw, every = random.Random(SEED), range(len(PHRASINGS))
    pairs = [pair.replace("_", " ").split(":") for pair in CAPITALS.split()]
    unknown = set(draw.sample([country for country, _ in pairs if country != ASKED], UNKNOWN))
    made = []
    for country, capital in pairs:
        chosen = 0 if country == ASKED else draw.choice(every)
        told = tuple(i for i in every if (i == chosen) == (country in unknown))
        made.append(Fact(country, capital, told))
    return tuple(made)


class Sentences(Corpus):
    """Training texts, a sentence per document, in several orders, and the held-out ones."""

    def __init__(self) -> None:
        lines = [fact.sentence(i) for fact in facts() for i in fact.told]
        super().__init__("countries", fingerprint("countries", lines), Shares(0.0, 0.0))

    def _stream(self, split: SplitName) -> Iterator[Document]:
        every = range(len(PHRASINGS))
        chosen = [(fact, i) for fact in facts() for i in every if (i in fact.told) == (split == "train")]
        for turn in range(PASSES if split == "train" else 1):
            random.Random(f"{SEED} {split} {turn}").shuffle(chosen)
            for number, (fact, i) in enumerate(chosen):
                yield Document(f"{turn}:{number}", fact.sentence(i))
