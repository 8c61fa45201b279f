//! Flights: what the demo imports, and the rules it imports by. Pure but for unpacking the embedded files.
//!
//! A row is valid when its values make sense together; what is merely missing from the reference tables becomes a
//! gap of the record, and a flight that never departed is a record with that status.

use std::collections::BTreeMap;
use std::io::Read;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

/// How many flights there are.
pub const ROWS: u32 = 336_776;

static FLIGHTS: &[u8] = include_bytes!("../../data/flights.csv.zst");
static AIRLINES: &[u8] = include_bytes!("../../data/airlines.csv.zst");
static AIRPORTS: &[u8] = include_bytes!("../../data/airports.csv.zst");
static PLANES: &[u8] = include_bytes!("../../data/planes.csv.zst");

fn unpack(packed: &[u8]) -> String {
    let mut text = String::new();
    ruzstd::decoding::StreamingDecoder::new(packed)
        .expect("the embedded file is a zstd frame")
        .read_to_string(&mut text)
        .expect("the embedded file is text");
    text
}

/// All rows as text, unpacked once, and where each begins.
fn source() -> &'static (String, Vec<usize>) {
    static SOURCE: OnceLock<(String, Vec<usize>)> = OnceLock::new();
    SOURCE.get_or_init(|| {
        let text = unpack(FLIGHTS);
        // The first line is the header; every line ends in a line feed.
        let starts = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at + 1).collect();
        (text, starts)
    })
}

/// Row `number`, counted from 1.
pub fn row(number: u32) -> Option<String> {
    let (text, starts) = source();
    let index = usize::try_from(number).ok()?.checked_sub(1)?;
    let (from, to) = (*starts.get(index)?, *starts.get(index + 1)?);
    text.get(from..to - 1).map(str::to_owned)
}

/// `n` rows, spread evenly over the year, with their numbers, in order.
pub fn rows(n: u32) -> impl Iterator<Item = (u32, String)> {
    let n = n.min(ROWS);
    (0..n).filter_map(move |i| {
        let number = u32::try_from(u64::from(i) * u64::from(ROWS) / u64::from(n)).ok()? + 1;
        row(number).map(|line| (number, line))
    })
}

/// Why a row is not valid. It names the field and says what is wrong, and holds no value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Invalid {
    /// A stable word.
    pub code: &'static str,
    /// The column.
    pub field: &'static str,
    /// What is wrong.
    pub message: &'static str,
}

fn invalid<T>(code: &'static str, field: &'static str, message: &'static str) -> Result<T, Invalid> {
    Err(Invalid { code, field, message })
}

/// How a flight went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// It arrived.
    Flown,
    /// It departed and arrived, but not as planned: no air time is known.
    Diverted,
    /// It never departed.
    Cancelled,
}

/// A valid row.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flight {
    /// `YYYY-MM-DD`, local.
    pub date: String,
    /// Two-character carrier code.
    pub carrier: String,
    /// Flight number.
    pub flight: u32,
    /// The plane's tail number.
    pub tailnum: Option<String>,
    /// Airport of departure.
    pub origin: String,
    /// Airport of destination.
    pub dest: String,
    /// Scheduled departure, UTC, to the minute.
    pub scheduled: String,
    /// How it went.
    pub status: Status,
    /// Minutes late at departure; negative is early.
    pub dep_delay: Option<i32>,
    /// Minutes late at arrival.
    pub arr_delay: Option<i32>,
    /// Minutes in the air.
    pub air_time: Option<u32>,
    /// Miles.
    pub distance: u32,
}

/// Minutes since midnight of a clock time like `517`; midnight may be written 2400.
fn clock(text: &str, field: &'static str) -> Result<i32, Invalid> {
    match text.parse::<i32>() {
        Ok(time @ 0..=2400) if time % 100 < 60 => Ok(time / 100 * 60 + time % 100),
        Ok(_) => invalid("impossible_time", field, "is not a time of day"),
        Err(_) => invalid("not_a_number", field, "is not a number"),
    }
}

fn number<T: std::str::FromStr>(text: &str, field: &'static str) -> Result<T, Invalid> {
    text.parse().or_else(|_| invalid("not_a_number", field, "is not a number"))
}

fn known(text: &str) -> Option<&str> {
    (!text.is_empty() && text != "NA").then_some(text)
}

/// True when `late` minutes after `scheduled` is `actual`, on whatever day.
fn agrees(scheduled: i32, late: i32, actual: i32) -> bool {
    (actual - scheduled - late).rem_euclid(1_440) == 0
}

/// Parses and validates one row.
///
/// # Errors
/// [`Invalid`] naming the first column that makes no sense.
pub fn parse(line: &str) -> Result<Flight, Invalid> {
    let columns: Vec<&str> = line.trim_end().split(',').collect();
    let [
        year,
        month,
        day,
        dep_time,
        sched_dep_time,
        dep_delay,
        arr_time,
        sched_arr_time,
        arr_delay,
        carrier,
        flight,
        tailnum,
        origin,
        dest,
        air_time,
        distance,
        hour,
        minute,
        time_hour,
    ] = columns[..]
    else {
        return invalid("wrong_columns", "line", "does not have 19 columns");
    };
    let (year, month, day): (u32, u32, u32) = (number(year, "year")?, number(month, "month")?, number(day, "day")?);
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month {
        2 => 28 + u32::from(leap),
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return invalid("impossible_date", "month", "is not 1 to 12"),
    };
    if !(1..=days).contains(&day) {
        return invalid("impossible_date", "day", "is not a day of that month");
    }
    let scheduled = clock(sched_dep_time, "sched_dep_time")?;
    let (hour, minute): (i32, i32) = (number(hour, "hour")?, number(minute, "minute")?);
    if hour * 60 + minute != scheduled {
        return invalid("schedule_contradicts_itself", "hour", "and minute are not the scheduled departure");
    }
    if time_hour.len() != 20 || !time_hour.ends_with(":00:00Z") {
        return invalid("impossible_time", "time_hour", "is not a full hour in UTC");
    }
    for (text, field) in [(carrier, "carrier"), (origin, "origin"), (dest, "dest")] {
        if known(text).is_none() {
            return invalid("missing_value", field, "is empty");
        }
    }
    let departed = known(dep_time).map(|time| clock(time, "dep_time")).transpose()?;
    let arrived = known(arr_time).map(|time| clock(time, "arr_time")).transpose()?;
    let dep_delay = known(dep_delay).map(|delay| number::<i32>(delay, "dep_delay")).transpose()?;
    let arr_delay = known(arr_delay).map(|delay| number::<i32>(delay, "arr_delay")).transpose()?;
    let air_time = known(air_time).map(|minutes| number::<u32>(minutes, "air_time")).transpose()?;
    let distance: u32 = number(distance, "distance")?;
    let status = match (departed, arrived, air_time) {
        (None, None, None) => Status::Cancelled,
        (None, _, _) => return invalid("arrived_without_departure", "dep_time", "is empty, but the flight arrived"),
        (Some(_), None, _) => return invalid("arrival_missing", "arr_time", "is empty, but the flight departed"),
        (Some(_), Some(_), None) => Status::Diverted,
        (Some(_), Some(_), Some(_)) => Status::Flown,
    };
    match (departed, dep_delay) {
        (Some(actual), Some(late)) if !agrees(scheduled, late, actual) => {
            return invalid("delay_contradicts_times", "dep_delay", "is not the time between schedule and departure");
        }
        (Some(_), None) => return invalid("missing_value", "dep_delay", "is empty, but the flight departed"),
        _ => {}
    }
    if let (Some(actual), Some(late)) = (arrived, arr_delay)
        && !agrees(clock(sched_arr_time, "sched_arr_time")?, late, actual)
    {
        return invalid("delay_contradicts_times", "arr_delay", "is not the time between schedule and arrival");
    }
    // Faster than 650 miles an hour over ground: no airliner of 2013, so one of the two numbers is wrong.
    if air_time.is_some_and(|minutes| u64::from(distance) * 60 > 650 * u64::from(minutes)) {
        return invalid("speed_implausible", "air_time", "is too short for the distance");
    }
    Ok(Flight {
        date: format!("{year:04}-{month:02}-{day:02}"),
        carrier: carrier.to_owned(),
        flight: number(flight, "flight")?,
        tailnum: known(tailnum).map(str::to_owned),
        origin: origin.to_owned(),
        dest: dest.to_owned(),
        scheduled: format!("{}:{minute:02}Z", &time_hour[..13]),
        status,
        dep_delay,
        arr_delay,
        air_time,
        distance,
    })
}

/// A plane, as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plane {
    /// Who built it.
    pub maker: String,
    /// Its model.
    pub model: String,
    /// When it was built.
    pub built: Option<u32>,
    /// How many it seats.
    pub seats: Option<u32>,
}

/// The reference tables.
#[derive(Debug, Default)]
pub struct Reference {
    airlines: BTreeMap<String, String>,
    airports: BTreeMap<String, String>,
    planes: BTreeMap<String, Plane>,
}

impl Reference {
    /// Unpacks the embedded tables.
    ///
    /// # Panics
    /// If they are not what they were when they were embedded.
    pub fn load() -> Self {
        let mut reference = Self::default();
        let records = |packed: &[u8], mut each: Box<dyn FnMut(&csv::StringRecord) + '_>| {
            let text = unpack(packed);
            for record in csv::Reader::from_reader(text.as_bytes()).records() {
                each(&record.expect("the embedded table is CSV"));
            }
        };
        let column = |record: &csv::StringRecord, at: usize| record.get(at).unwrap_or_default().trim().to_owned();
        let airlines = &mut reference.airlines;
        records(AIRLINES, Box::new(|record| drop(airlines.insert(column(record, 0), column(record, 1)))));
        let airports = &mut reference.airports;
        records(AIRPORTS, Box::new(|record| drop(airports.insert(column(record, 0), column(record, 1)))));
        let planes = &mut reference.planes;
        records(
            PLANES,
            Box::new(|record| {
                let plane = Plane {
                    maker: column(record, 3),
                    model: column(record, 4),
                    built: column(record, 1).parse().ok(),
                    seats: column(record, 6).parse().ok(),
                };
                planes.insert(column(record, 0), plane);
            }),
        );
        reference
    }
}

/// A flight with what the reference tables know of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enriched {
    /// The flight.
    pub flight: Flight,
    /// The carrier's name.
    pub carrier_name: Option<String>,
    /// The airport of departure.
    pub origin_name: Option<String>,
    /// The destination.
    pub dest_name: Option<String>,
    /// The plane.
    pub plane: Option<Plane>,
    /// Columns that the tables do not know.
    pub gaps: Vec<String>,
}

/// Looks a flight up in the reference tables. What they do not know is a gap, never an error.
pub fn enrich(flight: &Flight, reference: &Reference) -> Enriched {
    let carrier_name = reference.airlines.get(&flight.carrier).cloned();
    let origin_name = reference.airports.get(&flight.origin).cloned();
    let dest_name = reference.airports.get(&flight.dest).cloned();
    let plane = flight.tailnum.as_ref().and_then(|tailnum| reference.planes.get(tailnum)).cloned();
    let gaps = [
        ("carrier", carrier_name.is_none()),
        ("origin", origin_name.is_none()),
        ("dest", dest_name.is_none()),
        ("tailnum", plane.is_none()),
    ];
    let gaps = gaps.iter().filter(|(_, gap)| *gap).map(|(column, _)| (*column).to_owned()).collect();
    Enriched { flight: flight.clone(), carrier_name, origin_name, dest_name, plane, gaps }
}

/// The record that the import leaves: one flat row of the result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// `YYYY-MM-DD`, local.
    pub date: String,
    /// Scheduled departure, UTC.
    pub scheduled: String,
    /// Carrier code.
    pub carrier: String,
    /// Carrier name.
    pub carrier_name: Option<String>,
    /// Flight number.
    pub flight: u32,
    /// Airport of departure.
    pub origin: String,
    /// Destination.
    pub dest: String,
    /// The destination's name.
    pub dest_name: Option<String>,
    /// How it went.
    pub status: Status,
    /// Minutes late at departure.
    pub dep_delay: Option<i32>,
    /// Minutes late at arrival.
    pub arr_delay: Option<i32>,
    /// Minutes in the air.
    pub air_time: Option<u32>,
    /// Miles.
    pub distance: u32,
    /// Tail number.
    pub tailnum: Option<String>,
    /// Who built the plane.
    pub plane_maker: Option<String>,
    /// Its model.
    pub plane_model: Option<String>,
    /// Its age at the flight, in years.
    pub plane_age: Option<u32>,
    /// How many it seats.
    pub plane_seats: Option<u32>,
    /// What the reference tables do not know, separated by spaces.
    pub gaps: String,
}

/// The record of an enriched flight.
pub fn record(enriched: &Enriched) -> Record {
    let Enriched { flight, carrier_name, dest_name, plane, gaps, .. } = enriched.clone();
    let year = flight.date.get(..4).and_then(|year| year.parse::<u32>().ok());
    let built = plane.as_ref().and_then(|plane| plane.built);
    Record {
        plane_age: year.zip(built).and_then(|(year, built)| year.checked_sub(built)),
        plane_seats: plane.as_ref().and_then(|plane| plane.seats),
        plane_maker: plane.as_ref().map(|plane| plane.maker.clone()),
        plane_model: plane.map(|plane| plane.model),
        date: flight.date,
        scheduled: flight.scheduled,
        carrier: flight.carrier,
        carrier_name,
        flight: flight.flight,
        origin: flight.origin,
        dest: flight.dest,
        dest_name,
        status: flight.status,
        dep_delay: flight.dep_delay,
        arr_delay: flight.arr_delay,
        air_time: flight.air_time,
        distance: flight.distance,
        tailnum: flight.tailnum,
        gaps: gaps.join(" "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &str = "2013,1,1,517,515,2,830,819,11,UA,1545,N14228,EWR,IAH,227,1400,5,15,2013-01-01T10:00:00Z";

    #[test]
    fn each_rule_has_its_code() {
        let swap = |from: &str, to: &str| {
            assert!(PLAIN.contains(from), "{from}");
            parse(&PLAIN.replacen(from, to, 1))
                .map(|flight| flight.status)
                .map_err(|invalid| (invalid.code, invalid.field))
        };
        assert_eq!(parse(PLAIN).map(|flight| flight.status), Ok(Status::Flown));
        for (from, to, expected) in [
            ("2013,1,1,", "2013,2,29,", Err(("impossible_date", "day"))),
            ("2013,1,1,", "2012,2,29,", Ok(Status::Flown)),
            ("2013,1,1,", "2013,13,1,", Err(("impossible_date", "month"))),
            ("2013,1,1,", "2013,x,1,", Err(("not_a_number", "month"))),
            (",517,", ",2517,", Err(("impossible_time", "dep_time"))),
            (",517,", ",560,", Err(("impossible_time", "dep_time"))),
            (",517,515,2,", ",2400,515,1125,", Ok(Status::Flown)),
            (",2,830", ",3,830", Err(("delay_contradicts_times", "dep_delay"))),
            (",11,UA", ",12,UA", Err(("delay_contradicts_times", "arr_delay"))),
            (",517,515,2,830,", ",NA,515,NA,830,", Err(("arrived_without_departure", "dep_time"))),
            (",830,819,11,", ",NA,819,NA,", Err(("arrival_missing", "arr_time"))),
            (",227,", ",NA,", Ok(Status::Diverted)),
            (",227,", ",120,", Err(("speed_implausible", "air_time"))),
            (",5,15,", ",5,16,", Err(("schedule_contradicts_itself", "hour"))),
            ("UA", "NA", Err(("missing_value", "carrier"))),
            (":00:00Z", ":30:00Z", Err(("impossible_time", "time_hour"))),
            (",1400,", ",1400,1,", Err(("wrong_columns", "line"))),
        ] {
            assert_eq!(swap(from, to), expected, "{from} -> {to}");
        }
        let cancelled = "2013,1,1,NA,1630,NA,NA,1815,NA,EV,4308,NA,EWR,RDU,NA,416,16,30,2013-01-01T21:00:00Z";
        assert_eq!(parse(cancelled).map(|flight| (flight.status, flight.tailnum)), Ok((Status::Cancelled, None)));
    }

    #[test]
    fn the_whole_year_is_as_described() {
        let reference = Reference::load();
        let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
        let mut count = |what| *counts.entry(what).or_default() += 1;
        for (_, line) in rows(ROWS) {
            match parse(&line) {
                Ok(flight) => {
                    count(match flight.status {
                        Status::Flown => "flown",
                        Status::Diverted => "diverted",
                        Status::Cancelled => "cancelled",
                    });
                    let record = record(&enrich(&flight, &reference));
                    if record.gaps.contains("dest") {
                        count("gap dest");
                    }
                    if record.carrier_name.is_none() {
                        count("gap carrier");
                    }
                }
                Err(invalid) => count(invalid.code),
            }
        }
        let counts: Vec<String> = counts.iter().map(|(what, n)| format!("{what} {n}")).collect();
        assert_eq!(
            counts,
            [
                "arrival_missing 458",
                "cancelled 8255",
                "diverted 717",
                "flown 327344",
                "gap dest 7601",
                "speed_implausible 2"
            ]
        );
    }

    #[test]
    fn a_sample_is_spread_over_the_year_and_in_order() {
        let sample: Vec<(u32, String)> = rows(24).collect();
        assert_eq!(sample.len(), 24);
        assert!(sample.windows(2).all(|pair| pair[0].0 < pair[1].0));
        let months: std::collections::BTreeSet<String> =
            sample.iter().filter_map(|(_, line)| parse(line).ok()).map(|flight| flight.date[5..7].to_owned()).collect();
        assert_eq!(months.len(), 12, "{months:?}");
        assert_eq!(rows(ROWS).count(), ROWS as usize);
        assert_eq!((row(0), row(ROWS + 1)), (None, None));
        assert!(row(ROWS).is_some());
    }
}
