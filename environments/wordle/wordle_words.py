"""Five-letter words of everyday English, each of them a possible secret."""

from __future__ import annotations

WORDS = tuple(
    """
    about above actor acute admit adopt adult after again agent agree ahead alarm album alert alike alive allow alone
    along alter among anger angle angry apart apple apply arena argue arise armor array arrow aside asset audio audit
    avoid awake award aware bacon badge baker basic basin basis beach beard beast begin being below bench berry birth
    black blade blame blank blast blaze bleed blend bless blind block blood bloom board boast bonus boost booth bound
    brain brake brand brave bread break breed brick bride brief bring broad brook broom brown brush build bunch burst
    cabin cable camel candy cargo carry carve catch cause cedar chain chair chalk charm chart chase cheap check cheek
    cheer chess chest chief child chill choir chord civic civil claim class clean clear clerk cliff climb clock close
    cloth cloud coach coast coral couch could count court cover crack craft crane crash crawl cream creek crest crime
    crisp cross crowd crown crush curve cycle daily dairy dance delay depth diary dirty donor doubt dozen draft drain
    drama dream dress drift drill drink drive eager eagle early earth eight elbow elder elite empty enemy enjoy enter
    entry equal error essay event every exact exist extra fable faith false fancy favor feast fence fever fiber field
    fifth fight final first flame flash fleet flesh float flock flood floor flour fluid focus force forge forth forum
    found frame fresh front frost fruit funny ghost giant given glass globe glory glove grace grade grain grand grant
    grape graph grass grave great green greet grief grill group grove grown guard guess guest guide habit happy harsh
    haste heart heavy hedge hello hobby honey honor horse hotel house human humor ideal image index inner input issue
    ivory jelly jewel joint judge juice knife knock known label labor large laser later laugh layer learn lease least
    leave lemon level light limit linen liver local lodge logic loose lorry lover lower loyal lucky lunch magic major
    maple march match mayor medal media mercy merit metal meter might minor mixed model money month moral motor mount
    mouse mouth movie music naval nerve never night noble noise north novel nurse ocean offer often olive onion opera
    orbit order organ other ought outer owner paint panel panic paper party pasta patch pause peace pearl phase phone
    photo piano piece pilot pitch place plain plane plant plate plaza plumb point poppy porch pound power press price
    pride prime print prior prize proof proud prove pulse punch pupil purse queen query quest quick quiet quilt quite
    quote radar radio raise ranch range rapid ratio reach react ready realm rebel refer reign relax reply rider ridge
    rifle right rigid risky rival river roast robin robot rocky rough round route royal rugby ruler rural salad sauce
    scale scarf scene scent scope score scout sense serve seven shade shake shape share sharp sheep sheet shelf shell
    shift shine shirt shock shoot shore short shout sight silly since skate skill skirt skull slate sleep slice slide
    slope small smart smell smile smoke snake solar solid solve sorry sound south space spare spark speak speed spell
    spend spice spine split spoon sport spray squad staff stage stair stake stand stare start state steam steel steep
    stern stick still stone stool store storm story stove straw strip study stuff style sugar suite sunny super sweet
    swift swing sword table taste teach thank theme there thick thief thing think third thorn those three throw thumb
    tiger tight timer title toast today token tooth topic torch total touch tough towel tower toxic trace track trade
    trail train treat trend trial tribe trick troop truck truly trunk trust truth twice twist uncle under union unite
    unity until upper upset urban usage usual valid value valve vapor video visit vital vivid vocal voice voter wagon
    waist waste watch water weary weigh whale wheat wheel where which while white whole widow woman world worry worth
    would wound wrist write wrong yacht yield young youth zebra
    """.split()  # noqa: SIM905 - a list of quoted words would fill pages
)
