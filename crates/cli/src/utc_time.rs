//! A moment as people read it.

/// Seconds since 1970 as date and time, UTC, in the proleptic Gregorian calendar.
pub(crate) fn utc(secs: u64) -> String {
    let (days, of_day) = (secs / 86_400, secs % 86_400);
    // Years begin in March here, so that the leap day is their last; 400 of them have 146,097 days. The first began in the year 0.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year_of_era = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day_of_month = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, next) = match month {
        0..10 => (month + 3, 0),
        _ => (month - 9, 1),
    };
    let year = 400 * era + year_of_era + next;
    let (hours, minutes) = (of_day / 3_600, of_day / 60 % 60);
    let secs = of_day % 60;
    format!("{year}-{month:02}-{day_of_month:02} {hours:02}:{minutes:02}:{secs:02} UTC")
}

#[cfg(test)]
mod tests {
    use super::utc;

    #[test]
    fn dates() {
        for (secs, date) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399, "2000-02-28 23:59:59 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_795_353_240, "2026-11-22 13:14:00 UTC"),
            (4_107_542_399, "2100-02-28 23:59:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(utc(secs), date);
        }
    }
}
