"""Facts of science, each a pair, sorted into families whose members can be mistaken for each other.

Parts: `FAMILIES`, `Family`. A family asks in both directions (what is the symbol of tin; which element has the symbol
Sn), and the other members of the family are the wrong choices, so that a wrong choice is never obviously of another
kind. Invariant: within a family, no left side and no right side occurs twice; `tests/` holds that.
"""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """One kind of fact: how it is asked in either direction (`{}` is the side that is given), and its pairs."""

    name: str
    subject: str
    forward: str
    backward: str
    pairs: tuple[tuple[str, str], ...]


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """Pairs from lines of `left = right; left = right`."""
    entries = [entry for line in text.strip().splitlines() for entry in line.split(";") if entry.strip()]
    pairs = [entry.split("=", 1) for entry in entries]
    return tuple((left.strip(), right.strip()) for left, right in pairs)


_SYMBOLS = """
hydrogen = H; helium = He; lithium = Li; beryllium = Be; boron = B; carbon = C; nitrogen = N; oxygen = O; fluorine = F
neon = Ne; sodium = Na; magnesium = Mg; aluminium = Al; silicon = Si; phosphorus = P; sulfur = S; chlorine = Cl
argon = Ar; potassium = K; calcium = Ca; scandium = Sc; titanium = Ti; vanadium = V; chromium = Cr; manganese = Mn
iron = Fe; cobalt = Co; nickel = Ni; copper = Cu; zinc = Zn; gallium = Ga; germanium = Ge; arsenic = As; selenium = Se
bromine = Br; krypton = Kr; rubidium = Rb; strontium = Sr; yttrium = Y; zirconium = Zr; niobium = Nb; molybdenum = Mo
technetium = Tc; ruthenium = Ru; rhodium = Rh; palladium = Pd; silver = Ag; cadmium = Cd; indium = In; tin = Sn
antimony = Sb; tellurium = Te; iodine = I; xenon = Xe; caesium = Cs; barium = Ba; lanthanum = La; cerium = Ce
tungsten = W; rhenium = Re; osmium = Os; iridium = Ir; platinum = Pt; gold = Au; mercury = Hg; thallium = Tl
lead = Pb; bismuth = Bi; polonium = Po; radon = Rn; radium = Ra; thorium = Th; uranium = U; plutonium = Pu
"""

_ATOMIC_NUMBERS = """
hydrogen = 1; helium = 2; lithium = 3; beryllium = 4; boron = 5; carbon = 6; nitrogen = 7; oxygen = 8; fluorine = 9
neon = 10; sodium = 11; magnesium = 12; aluminium = 13; silicon = 14; phosphorus = 15; sulfur = 16; chlorine = 17
argon = 18; potassium = 19; calcium = 20; scandium = 21; titanium = 22; vanadium = 23; chromium = 24; manganese = 25
iron = 26; cobalt = 27; nickel = 28; copper = 29; zinc = 30; bromine = 35; krypton = 36; silver = 47; tin = 50
iodine = 53; xenon = 54; barium = 56; tungsten = 74; platinum = 78; gold = 79; mercury = 80; lead = 82; radon = 86
uranium = 92
"""

_FORMULAS = """
water = H2O; carbon dioxide = CO2; carbon monoxide = CO; ammonia = NH3; methane = CH4; ethane = C2H6; propane = C3H8
butane = C4H10; ethene = C2H4; ethyne = C2H2; benzene = C6H6; methanol = CH3OH; ethanol = C2H5OH; glucose = C6H12O6
sucrose = C12H22O11; table salt = NaCl; sodium hydroxide = NaOH; hydrochloric acid = HCl; sulfuric acid = H2SO4
nitric acid = HNO3; phosphoric acid = H3PO4; acetic acid = CH3COOH; calcium carbonate = CaCO3; quartz = SiO2
hydrogen peroxide = H2O2; nitrous oxide = N2O; nitrogen dioxide = NO2; sulfur dioxide = SO2; ozone = O3
hydrogen sulfide = H2S; baking soda = NaHCO3; washing soda = Na2CO3; quicklime = CaO; slaked lime = Ca(OH)2
haematite = Fe2O3; magnetite = Fe3O4; alumina = Al2O3; potassium nitrate = KNO3; copper sulfate = CuSO4
silver chloride = AgCl; hydrogen cyanide = HCN; urea = CO(NH2)2; formaldehyde = CH2O; acetone = C3H6O
"""

_UNITS = """
force = newton; energy = joule; power = watt; pressure = pascal; frequency = hertz; electric charge = coulomb
electric potential = volt; electric resistance = ohm; electric conductance = siemens; capacitance = farad
inductance = henry; magnetic flux = weber; magnetic flux density = tesla; electric current = ampere
thermodynamic temperature = kelvin; amount of substance = mole; luminous intensity = candela; luminous flux = lumen
illuminance = lux; radioactive activity = becquerel; absorbed dose = gray; equivalent dose = sievert; mass = kilogram
length = metre; time = second; plane angle = radian; solid angle = steradian; catalytic activity = katal
"""

_BASE_UNITS = """
newton = kg m s^-2; joule = kg m^2 s^-2; watt = kg m^2 s^-3; pascal = kg m^-1 s^-2; hertz = s^-1; coulomb = A s
volt = kg m^2 s^-3 A^-1; ohm = kg m^2 s^-3 A^-2; farad = kg^-1 m^-2 s^4 A^2; tesla = kg s^-2 A^-1
weber = kg m^2 s^-2 A^-1; henry = kg m^2 s^-2 A^-2; siemens = kg^-1 m^-2 s^3 A^2; gray = m^2 s^-2; katal = mol s^-1
"""

_PREFIXES = """
exa = 10^18; peta = 10^15; tera = 10^12; giga = 10^9; mega = 10^6; kilo = 10^3; hecto = 10^2; deca = 10^1
deci = 10^-1; centi = 10^-2; milli = 10^-3; micro = 10^-6; nano = 10^-9; pico = 10^-12; femto = 10^-15; atto = 10^-18
"""

_LAWS = """
pressure of a gas is inversely proportional to its volume at constant temperature = Boyle's law
volume of a gas is proportional to its temperature at constant pressure = Charles's law
equal volumes of gases hold equal numbers of molecules at equal temperature and pressure = Avogadro's law
extension of a spring is proportional to the force = Hooke's law
current through a conductor is proportional to the voltage = Ohm's law
currents into a junction add up to zero = Kirchhoff's current law
voltages around a closed loop add up to zero = Kirchhoff's voltage law
induced voltage opposes the change that causes it = Lenz's law
planets move in ellipses with the Sun at one focus = Kepler's first law
a planet sweeps out equal areas in equal times = Kepler's second law
square of a planet's period is proportional to the cube of its orbit's semi-major axis = Kepler's third law
a floating body displaces its own weight of fluid = Archimedes' principle
pressure in a flowing fluid falls where its speed rises = Bernoulli's principle
sines of the angles of incidence and refraction have a constant ratio = Snell's law
force between two charges falls with the square of their distance = Coulomb's law
power radiated by a black body grows with the fourth power of its temperature = Stefan-Boltzmann law
peak wavelength of a black body is inversely proportional to its temperature = Wien's law
rate of diffusion of a gas is inversely proportional to the square root of its molar mass = Graham's law
amount of dissolved gas is proportional to its pressure = Henry's law
"""

_ORGANELLES = """
makes most of a eukaryotic cell's ATP = mitochondrion; carries out photosynthesis = chloroplast
translates messenger RNA into protein = ribosome; keeps most of the cell's DNA = nucleus
sorts and packs proteins for export = Golgi apparatus; digests worn-out parts with acid enzymes = lysosome
makes lipids and breaks down toxins = smooth endoplasmic reticulum
folds proteins made on its attached ribosomes = rough endoplasmic reticulum
breaks down fatty acids and hydrogen peroxide = peroxisome; holds water and keeps a plant cell firm = central vacuole
organises the spindle in animal cells = centrosome; assembles ribosomal subunits = nucleolus
gives a plant cell its rigid outer wall of cellulose = cell wall; decides what enters and leaves = plasma membrane
"""

_ORGANS = """
insulin = pancreas; adrenaline = adrenal gland; thyroxine = thyroid gland; growth hormone = pituitary gland
melatonin = pineal gland; testosterone = testis; oestrogen = ovary; erythropoietin = kidney; bile = liver
gastrin = stomach; parathormone = parathyroid gland; leptin = fat tissue; thymosin = thymus
"""

_VITAMINS = """
scurvy = vitamin C; rickets = vitamin D; beriberi = vitamin B1; pellagra = vitamin B3; night blindness = vitamin A
poor blood clotting = vitamin K; pernicious anaemia = vitamin B12; goitre = iodine
iron-deficiency anaemia = iron; neural tube defects = folic acid
"""

_PLANETS = """
closest planet to the Sun = Mercury; hottest surface of all planets = Venus; the only planet known to bear life = Earth
tallest known volcano in the Solar System, Olympus Mons = Mars; largest planet = Jupiter
brightest and widest ring system = Saturn; axis tilted by about 98 degrees = Uranus
fastest winds, and farthest planet from the Sun = Neptune
dwarf planet in the asteroid belt = Ceres; dwarf planet with the moon Charon = Pluto
"""

_MOONS = """
Titan = Saturn; Europa = Jupiter; Triton = Neptune; Phobos = Mars; Miranda = Uranus; Charon = Pluto; the Moon = Earth
"""

_HARDNESS = """
talc = 1; gypsum = 2; calcite = 3; fluorite = 4; apatite = 5; orthoclase = 6; quartz = 7; topaz = 8; corundum = 9
diamond = 10
"""

_ROCKS = """
limestone = marble; sandstone = quartzite; shale = slate; granite = gneiss; basalt = amphibolite
peridotite = serpentinite; coal = graphite-bearing anthracite
"""

FAMILIES: tuple[Family, ...] = (
    Family(
        "symbols",
        "chemistry",
        "What is the chemical symbol of {}?",
        "Which element has the symbol {}?",
        _pairs(_SYMBOLS),
    ),
    Family(
        "atomic_numbers",
        "chemistry",
        "How many protons are in the nucleus of an atom of {}?",
        "Which element has the atomic number {}?",
        _pairs(_ATOMIC_NUMBERS),
    ),
    Family(
        "formulas",
        "chemistry",
        "What is the chemical formula of {}?",
        "Which substance has the formula {}?",
        _pairs(_FORMULAS),
    ),
    Family(
        "units",
        "physics",
        "In which SI unit is {} measured?",
        "Which quantity is measured in the SI unit {}?",
        _pairs(_UNITS),
    ),
    Family(
        "base_units",
        "physics",
        "What is one {} in SI base units?",
        "Which unit equals {} in SI base units?",
        _pairs(_BASE_UNITS),
    ),
    Family(
        "prefixes",
        "physics",
        "Which factor does the SI prefix {} stand for?",
        "Which SI prefix stands for {}?",
        _pairs(_PREFIXES),
    ),
    Family("laws", "physics", "Which law or principle says that the {}?", "What does {} say? The ...", _pairs(_LAWS)),
    Family(
        "organelles",
        "biology",
        "Which part of a cell {}?",
        "What does this part of a cell do: the {}?",
        _pairs(_ORGANELLES),
    ),
    Family(
        "organs", "biology", "Where in the body is {} mainly made?", "What is made in this place: {}?", _pairs(_ORGANS)
    ),
    Family(
        "vitamins",
        "biology",
        "The lack of which nutrient causes {}?",
        "What does a lack of {} cause?",
        _pairs(_VITAMINS),
    ),
    Family("planets", "astronomy", "Which body is meant: {}?", "What is true of {}?", _pairs(_PLANETS)),
    Family("moons", "astronomy", "Which body does {} orbit?", "Which of these orbits {}?", _pairs(_MOONS)),
    Family(
        "hardness",
        "geology",
        "What is the hardness of {} on the Mohs scale?",
        "Which mineral marks hardness {} on the Mohs scale?",
        _pairs(_HARDNESS),
    ),
    Family(
        "rocks",
        "geology",
        "Which rock does {} become by metamorphism?",
        "From which rock does {} form by metamorphism?",
        _pairs(_ROCKS),
    ),
)
