; The C interface that torch's own loaders open libraries with (AOTInductor's), over one program.
;
; A container holds the constants that runs read, and perhaps others that wait to take their place.
; Runs share a lock that changes take alone: what a run began with stays until it is through.

; lock, set in use, set that waits, list for queries, number of the device
%container = type { [64 x i8], ptr, ptr, ptr, i32 }

declare i32 @strncmp(ptr, ptr, i64) nonlazybind
declare i64 @read(i32, ptr, i64) nonlazybind
declare i32 @dladdr(ptr, ptr) nonlazybind
declare i32 @pthread_rwlock_init(ptr, ptr) nonlazybind
declare i32 @pthread_rwlock_destroy(ptr) nonlazybind
declare i32 @pthread_rwlock_rdlock(ptr) nonlazybind
declare i32 @pthread_rwlock_wrlock(ptr) nonlazybind
declare i32 @pthread_rwlock_unlock(ptr) nonlazybind
declare zeroext i1 @aoti_torch_grad_mode_is_enabled() nonlazybind
declare void @aoti_torch_grad_mode_set_enabled(i1 zeroext) nonlazybind

; --- containers ---

; A container over weights at %offset of a file, on a device by its number (-1: the current one).
define i32 @stator_open(ptr %result, ptr %path, i64 %offset, i32 %asked) {
  %device_at = alloca i32
  %settled = call i32 @settle_device(i32 %asked, ptr %device_at)
  %is_settled = icmp eq i32 %settled, 0
  br i1 %is_settled, label %start, label %fail
start:
  %device = load i32, ptr %device_at
  %chosen = call i32 @stator_choose_kernels()
  %is_chosen = icmp eq i32 %chosen, 0
  br i1 %is_chosen, label %weights, label %fail
weights:
  %bytes = load i64, ptr @blob_bytes
  %has_blob = icmp ne i64 %bytes, 0
  br i1 %has_blob, label %map, label %without
map:
  %mapping = call ptr @map_file(ptr %path, i64 %offset)
  %none = icmp eq ptr %mapping, null
  br i1 %none, label %fail, label %fill
fill:
  %blob = load ptr, ptr %mapping
  %mapped_set = call ptr @set_on_blob(ptr %blob, ptr %mapping, i32 %device)
  call void @leave_mapping(ptr %blob, ptr %mapping)
  %no_set = icmp eq ptr %mapped_set, null
  br i1 %no_set, label %fail, label %made
without:
  %empty_set = call ptr @set_on_blob(ptr @no_text, ptr null, i32 %device)
  %no_empty_set = icmp eq ptr %empty_set, null
  br i1 %no_empty_set, label %fail, label %made
made:
  %set = phi ptr [ %mapped_set, %fill ], [ %empty_set, %without ]
  %size = ptrtoint ptr getelementptr (%container, ptr null, i64 1) to i64
  %container = call ptr @calloc(i64 1, i64 %size)
  call i32 @pthread_rwlock_init(ptr %container, ptr null)
  %set_at = getelementptr %container, ptr %container, i64 0, i32 1
  store ptr %set, ptr %set_at
  %its_device_at = getelementptr %container, ptr %container, i64 0, i32 4
  store i32 %device, ptr %its_device_at
  store ptr %container, ptr %result
  ret i32 0
fail:
  ret i32 1
}

; Which device a container is on.
define internal i32 @device_of(ptr %container) {
  %at = getelementptr %container, ptr %container, i64 0, i32 4
  %device = load i32, ptr %at
  ret i32 %device
}

@no_path_text = text "the library cannot tell where its own file lies"
@weights_name = text ".weights"

define i32 @AOTInductorModelContainerCreateWithDevice(ptr %result, i64 %models, ptr %device, ptr %folder) {
entry:
  %info = alloca [4 x ptr]
  %tail = alloca [2 x i64]
  %path = alloca [4096 x i8]
  %number_at = alloca i32
  %bad = call i32 @device_named(ptr %device, ptr %number_at)
  %is_ours = icmp eq i32 %bad, 0
  br i1 %is_ours, label %where, label %other
other:
  ret i32 1
where:
  %number = load i32, ptr %number_at
  %bytes = load i64, ptr @blob_bytes
  %bare = icmp eq i64 %bytes, 0
  br i1 %bare, label %at_once, label %ask
at_once:
  %first = call i32 @stator_open(ptr %result, ptr @no_text, i64 0, i32 %number)
  ret i32 %first
ask:
  %told = call i32 @dladdr(ptr @stator_open, ptr %info)
  %own = load ptr, ptr %info
  %known = icmp ne i32 %told, 0
  br i1 %known, label %look, label %lost
lost:
  %lost_code = call i32 @say(ptr @no_path_text)
  ret i32 %lost_code
look:
  %length = call i64 @strlen(ptr %own)
  %fits = icmp slt i64 %length, 4000
  br i1 %fits, label %open_own, label %lost
open_own:
  ; The weights stand behind the code, if the file's last words say so, or in a file beside it.
  %file = call i32 (ptr, i32, ...) @open(ptr %own, i32 524288)
  call i64 @lseek(i32 %file, i64 -16, i32 2)
  %got = call i64 @read(i32 %file, ptr %tail, i64 16)
  call i32 @close(i32 %file)
  %mark = load i64, ptr %tail
  %whole = icmp eq i64 %got, 16
  %marked = icmp eq i64 %mark, {MARK}
  %behind = and i1 %whole, %marked
  br i1 %behind, label %within, label %beside
within:
  %offset_at = getelementptr i64, ptr %tail, i64 1
  %offset = load i64, ptr %offset_at
  %second = call i32 @stator_open(ptr %result, ptr %own, i64 %offset, i32 %number)
  ret i32 %second
beside:
  call ptr @memcpy(ptr %path, ptr %own, i64 %length)
  %stem = sub i64 %length, 3  ; without .so
  %name_at = getelementptr i8, ptr %path, i64 %stem
  call ptr @memcpy(ptr %name_at, ptr @weights_name, i64 9)
  %third = call i32 @stator_open(ptr %result, ptr %path, i64 0, i32 %number)
  ret i32 %third
}

define i32 @AOTInductorModelContainerCreate(ptr %result, i64 %models, i1 zeroext %is_cpu, ptr %folder) {
  %device = select i1 %is_cpu, ptr @cpu_text, ptr @cuda_text
  %code = call i32 @AOTInductorModelContainerCreateWithDevice(ptr %result, i64 %models, ptr %device, ptr %folder)
  ret i32 %code
}

define i32 @AOTInductorModelContainerDelete(ptr %container) {
  %active_at = getelementptr %container, ptr %container, i64 0, i32 1
  %active = load ptr, ptr %active_at
  call void @free_set(ptr %active)
  %inactive_at = getelementptr %container, ptr %container, i64 0, i32 2
  %inactive = load ptr, ptr %inactive_at
  call void @free_set(ptr %inactive)
  %list_at = getelementptr %container, ptr %container, i64 0, i32 3
  %list = load ptr, ptr %list_at
  call void @free(ptr %list)
  call i32 @pthread_rwlock_destroy(ptr %container)
  call void @free(ptr %container)
  ret i32 0
}

@input_count_format = text "%ld inputs, and the program takes %ld"
@output_count_format = text "%ld outputs asked for, and the program has %ld"

; Run on inputs that stay the caller's.
define i32 @stator_run(ptr %container, ptr %inputs, i64 %input_count, ptr %outputs, i64 %output_count) {
entry:
  %takes = load i64, ptr @input_count
  %gives = load i64, ptr @output_count
  %all_there = icmp eq i64 %input_count, %takes
  br i1 %all_there, label %outs, label %bad_inputs
bad_inputs:
  %room = call ptr @room_for_text()
  call i32 (ptr, i64, ptr, ...) @snprintf(ptr %room, i64 2048, ptr @input_count_format, i64 %input_count, i64 %takes)
  ret i32 1
outs:
  %all_asked = icmp eq i64 %output_count, %gives
  br i1 %all_asked, label %go, label %bad_outputs
bad_outputs:
  %other_room = call ptr @room_for_text()
  call i32 (ptr, i64, ptr, ...) @snprintf(ptr %other_room, i64 2048, ptr @output_count_format, i64 %output_count, i64 %gives)
  ret i32 1
go:
  call i32 @pthread_rwlock_rdlock(ptr %container)
  %set_at = getelementptr %container, ptr %container, i64 0, i32 1
  %set = load ptr, ptr %set_at
  %grad = call zeroext i1 @aoti_torch_grad_mode_is_enabled()
  call void @aoti_torch_grad_mode_set_enabled(i1 zeroext false)
  %device = call i32 @device_of(ptr %container)
  %code = call i32 @run(ptr %set, ptr %inputs, ptr %outputs, i32 %device)
  call void @aoti_torch_grad_mode_set_enabled(i1 zeroext %grad)
  call i32 @pthread_rwlock_unlock(ptr %container)
  ret i32 %code
}

define i32 @AOTInductorModelContainerRun(ptr %container, ptr %inputs, i64 %input_count, ptr %outputs, i64 %output_count, ptr %stream, ptr %proxy) {
entry:
  %guard_at = alloca ptr
  %device = call i32 @device_of(ptr %container)
  %entered = call i32 @enter_stream(ptr %stream, i32 %device, ptr %guard_at)
  %is_entered = icmp eq i32 %entered, 0
  br i1 %is_entered, label %go, label %end
go:
  %ran = call i32 @stator_run(ptr %container, ptr %inputs, i64 %input_count, ptr %outputs, i64 %output_count)
  call void @leave_stream(ptr %guard_at)
  br label %end
end:
  %code = phi i32 [ 1, %entry ], [ %ran, %go ]
  call void @stator_drop_handles(ptr %inputs, i64 %input_count)  ; they were given away
  ret i32 %code
}

define i32 @AOTInductorModelContainerRunSingleThreaded(ptr %container, ptr %inputs, i64 %input_count, ptr %outputs, i64 %output_count, ptr %stream, ptr %proxy) {
  %code = call i32 @AOTInductorModelContainerRun(ptr %container, ptr %inputs, i64 %input_count, ptr %outputs, i64 %output_count, ptr %stream, ptr %proxy)
  ret i32 %code
}

; --- names and numbers ---

@no_such_text = text "the number is higher than there are"

define i32 @AOTInductorModelContainerGetNumInputs(ptr %container, ptr %result) {
  %count = load i64, ptr @input_count
  store i64 %count, ptr %result
  ret i32 0
}

define i32 @AOTInductorModelContainerGetNumOutputs(ptr %container, ptr %result) {
  %count = load i64, ptr @output_count
  store i64 %count, ptr %result
  ret i32 0
}

define i32 @AOTInductorModelContainerGetNumConstants(ptr %container, ptr %result) {
  %count = load i64, ptr @constant_count
  store i64 %count, ptr %result
  ret i32 0
}

define internal i32 @name_in(ptr %names, i64 %count, i64 %number, ptr %result) {
  %there = icmp ult i64 %number, %count
  br i1 %there, label %good, label %bad
good:
  %at = getelementptr ptr, ptr %names, i64 %number
  %name = load ptr, ptr %at
  store ptr %name, ptr %result
  ret i32 0
bad:
  %code = call i32 @say(ptr @no_such_text)
  ret i32 %code
}

define i32 @AOTInductorModelContainerGetInputName(ptr %container, i64 %number, ptr %result) {
  %count = load i64, ptr @input_count
  %code = call i32 @name_in(ptr @input_names, i64 %count, i64 %number, ptr %result)
  ret i32 %code
}

define i32 @AOTInductorModelContainerGetOutputName(ptr %container, i64 %number, ptr %result) {
  %count = load i64, ptr @output_count
  %code = call i32 @name_in(ptr @output_names, i64 %count, i64 %number, ptr %result)
  ret i32 %code
}

define i32 @AOTInductorModelContainerGetCallSpec(ptr %container, ptr %in, ptr %out) {
  store ptr @in_spec, ptr %in
  store ptr @out_spec, ptr %out
  ret i32 0
}

; A field of a constant, %bytes wide and %offset from its start.
define internal i32 @field_of(i64 %number, i64 %offset, i64 %bytes, ptr %result) {
  %count = load i64, ptr @constant_count
  %there = icmp ult i64 %number, %count
  br i1 %there, label %good, label %bad
good:
  %it = getelementptr %constant, ptr @constants, i64 %number
  %at = getelementptr i8, ptr %it, i64 %offset
  call ptr @memcpy(ptr %result, ptr %at, i64 %bytes)
  ret i32 0
bad:
  %code = call i32 @say(ptr @no_such_text)
  ret i32 %code
}

define i32 @AOTInductorModelContainerGetConstantName(ptr %container, i64 %number, ptr %result) {
  %code = call i32 @field_of(i64 %number, i64 0, i64 8, ptr %result)
  ret i32 %code
}

define i32 @AOTInductorModelContainerGetConstantOriginalFQN(ptr %container, i64 %number, ptr %result) {
  %code = call i32 @field_of(i64 %number, i64 0, i64 8, ptr %result)
  ret i32 %code
}

define i32 @AOTInductorModelContainerGetConstantDataSize(ptr %container, i64 %number, ptr %result) {
  %code = call i32 @field_of(i64 %number, i64 16, i64 8, ptr %result)
  ret i32 %code
}

define i32 @AOTInductorModelContainerGetConstantDtype(ptr %container, i64 %number, ptr %result) {
  %code = call i32 @field_of(i64 %number, i64 24, i64 4, ptr %result)
  ret i32 %code
}

define i32 @AOTInductorModelContainerGetConstantType(ptr %container, i64 %number, ptr %result) {
  %code = call i32 @field_of(i64 %number, i64 28, i64 4, ptr %result)
  ret i32 %code
}

define i32 @AOTInductorModelContainerGetConstantFromFolded(ptr %container, i64 %number, ptr %result) {
  %code = call i32 @field_of(i64 %number, i64 36, i64 1, ptr %result)
  ret i32 %code
}

define i32 @AOTInductorModelContainerGetConstantsBlobSize(ptr %container, ptr %result) {
  %bytes = load i64, ptr @blob_bytes
  store i64 %bytes, ptr %result
  ret i32 0
}

; --- constants: asked for, changed, swapped ---

; The place of a set in a container: of the one in use, or of the other.
define internal ptr @place_of_set(ptr %container, i1 %inactive) {
  %first = getelementptr %container, ptr %container, i64 0, i32 1
  %second = getelementptr %container, ptr %container, i64 0, i32 2
  %place = select i1 %inactive, ptr %second, ptr %first
  ret ptr %place
}

; Put another set in the place of one.
define internal void @replace_set(ptr %place, ptr %set) {
  %old = load ptr, ptr %place
  store ptr %set, ptr %place
  call void @free_set(ptr %old)
  ret void
}

define internal i32 @update(ptr %container, ptr %pairs, i64 %count, i1 %inactive, i1 %full, i1 %itself) {
  call i32 @pthread_rwlock_wrlock(ptr %container)
  %place = call ptr @place_of_set(ptr %container, i1 %inactive)
  %active_at = call ptr @place_of_set(ptr %container, i1 false)
  %active = load ptr, ptr %active_at
  %there = load ptr, ptr %place
  %has_one = icmp ne ptr %there, null
  %base = select i1 %has_one, ptr %there, ptr %active
  %device = call i32 @device_of(ptr %container)
  %set = call ptr @set_of_pairs(ptr %base, ptr %pairs, i64 %count, i1 %full, i1 %itself, i32 %device)
  %good = icmp ne ptr %set, null
  br i1 %good, label %replace, label %done
replace:
  call void @replace_set(ptr %place, ptr %set)
  br label %done
done:
  call i32 @pthread_rwlock_unlock(ptr %container)
  %code = select i1 %good, i32 0, i32 1
  ret i32 %code
}

define internal i32 @update_from_map(ptr %container, ptr %map, i1 %inactive, i1 %full, i1 %itself) {
  %count_at = alloca i64
  %pairs = call ptr @pairs_of_map(ptr %map, ptr %count_at)
  %count = load i64, ptr %count_at
  %code = call i32 @update(ptr %container, ptr %pairs, i64 %count, i1 %inactive, i1 %full, i1 %itself)
  call void @free(ptr %pairs)
  ret i32 %code
}

define i32 @AOTInductorModelContainerUpdateConstantBuffer(ptr %container, ptr %map, i1 zeroext %inactive, i1 zeroext %full) {
  %code = call i32 @update_from_map(ptr %container, ptr %map, i1 %inactive, i1 %full, i1 false)
  ret i32 %code
}

define i32 @AOTInductorModelContainerUpdateConstantBufferPairs(ptr %container, ptr %pairs, i64 %count, i1 zeroext %inactive, i1 zeroext %full) {
  %code = call i32 @update(ptr %container, ptr %pairs, i64 %count, i1 %inactive, i1 %full, i1 false)
  ret i32 %code
}

define i32 @AOTInductorModelContainerUpdateConstantBufferFromCpu(ptr %container, ptr %map, i1 zeroext %inactive, i1 zeroext %full) {
  %code = call i32 @update_from_map(ptr %container, ptr %map, i1 %inactive, i1 %full, i1 false)
  ret i32 %code
}

define i32 @AOTInductorModelContainerUpdateConstantBufferFromCpuPairs(ptr %container, ptr %pairs, i64 %count, i1 zeroext %inactive, i1 zeroext %full) {
  %code = call i32 @update(ptr %container, ptr %pairs, i64 %count, i1 %inactive, i1 %full, i1 false)
  ret i32 %code
}

define i32 @AOTInductorModelContainerUpdateUserManagedConstantBuffer(ptr %container, ptr %map, i1 zeroext %inactive, i1 zeroext %full) {
  %code = call i32 @update_from_map(ptr %container, ptr %map, i1 %inactive, i1 %full, i1 true)
  ret i32 %code
}

define i32 @AOTInductorModelContainerUpdateUserManagedConstantBufferPairs(ptr %container, ptr %pairs, i64 %count, i1 zeroext %inactive, i1 zeroext %full) {
  %code = call i32 @update(ptr %container, ptr %pairs, i64 %count, i1 %inactive, i1 %full, i1 true)
  ret i32 %code
}

define i32 @AOTInductorModelContainerUpdateInactiveConstantBuffer(ptr %container, ptr %map) {
  %code = call i32 @update_from_map(ptr %container, ptr %map, i1 true, i1 true, i1 false)
  ret i32 %code
}

define i32 @AOTInductorModelContainerUpdateInactiveConstantBufferPairs(ptr %container, ptr %pairs, i64 %count) {
  %code = call i32 @update(ptr %container, ptr %pairs, i64 %count, i1 true, i1 true, i1 false)
  ret i32 %code
}

; All constants from a blob that the caller keeps.
define i32 @AOTInductorModelUpdateConstantsFromBlob(ptr %container, ptr %blob) {
  %device = call i32 @device_of(ptr %container)
  %set = call ptr @set_on_blob(ptr %blob, ptr null, i32 %device)
  %good = icmp ne ptr %set, null
  br i1 %good, label %replace, label %fail
replace:
  call i32 @pthread_rwlock_wrlock(ptr %container)
  %place = call ptr @place_of_set(ptr %container, i1 false)
  call void @replace_set(ptr %place, ptr %set)
  call i32 @pthread_rwlock_unlock(ptr %container)
  ret i32 0
fail:
  ret i32 1
}

; Folding happened when the library was built.
define i32 @AOTInductorModelContainerRunConstantFolding(ptr %container, i1 zeroext %inactive, ptr %stream, ptr %proxy) {
  ret i32 0
}

@no_other_set = text "there are no other constants to swap with; update the inactive ones first"

define i32 @AOTInductorModelContainerSwapConstantBuffer(ptr %container) {
  call i32 @pthread_rwlock_wrlock(ptr %container)
  %active_at = call ptr @place_of_set(ptr %container, i1 false)
  %inactive_at = call ptr @place_of_set(ptr %container, i1 true)
  %active = load ptr, ptr %active_at
  %inactive = load ptr, ptr %inactive_at
  %there = icmp ne ptr %inactive, null
  br i1 %there, label %swap, label %none
swap:
  store ptr %inactive, ptr %active_at
  store ptr %active, ptr %inactive_at
  call i32 @pthread_rwlock_unlock(ptr %container)
  ret i32 0
none:
  call i32 @pthread_rwlock_unlock(ptr %container)
  %code = call i32 @say(ptr @no_other_set)
  ret i32 %code
}

define i32 @AOTInductorModelContainerFreeInactiveConstantBuffer(ptr %container) {
  call i32 @pthread_rwlock_wrlock(ptr %container)
  %place = call ptr @place_of_set(ptr %container, i1 true)
  call void @replace_set(ptr %place, ptr null)
  call i32 @pthread_rwlock_unlock(ptr %container)
  ret i32 0
}

; The set that is asked for; null, with a message, if there is none.
define internal ptr @set_asked_for(ptr %container, i1 %inactive) {
  %place = call ptr @place_of_set(ptr %container, i1 %inactive)
  %set = load ptr, ptr %place
  %there = icmp ne ptr %set, null
  br i1 %there, label %done, label %none
none:
  call i32 @say(ptr @no_other_set)
  br label %done
done:
  ret ptr %set
}

define i32 @AOTInductorModelContainerExtractConstantsMap(ptr %container, ptr %map, i1 zeroext %inactive) {
entry:
  %count = load i64, ptr @constant_count
  %set = call ptr @set_asked_for(ptr %container, i1 %inactive)
  %there = icmp ne ptr %set, null
  br i1 %there, label %head, label %fail
head:
  %i = phi i64 [ 0, %entry ], [ %next, %body ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %body, label %done
body:
  %it = getelementptr %constant, ptr @constants, i64 %i
  %name = load ptr, ptr %it
  %handle_at = getelementptr ptr, ptr %set, i64 %i
  %handle = load ptr, ptr %handle_at
  call void @put_into_map(ptr %map, ptr %name, ptr %handle)
  %next = add i64 %i, 1
  br label %head
done:
  ret i32 0
fail:
  ret i32 1
}

define i32 @AOTInductorModelContainerExtractConstantsMapEntries(ptr %container, ptr %entries, ptr %entry_count, i1 zeroext %inactive) {
entry:
  %count = load i64, ptr @constant_count
  %set = call ptr @set_asked_for(ptr %container, i1 %inactive)
  %there = icmp ne ptr %set, null
  br i1 %there, label %start, label %fail
start:
  %room = add i64 %count, 1
  %pairs = call ptr @calloc(i64 %room, i64 16)
  %list_at = getelementptr %container, ptr %container, i64 0, i32 3
  %old = load ptr, ptr %list_at
  call void @free(ptr %old)
  store ptr %pairs, ptr %list_at
  br label %head
head:
  %i = phi i64 [ 0, %start ], [ %next, %body ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %body, label %done
body:
  %it = getelementptr %constant, ptr @constants, i64 %i
  %name = load ptr, ptr %it
  %handle_at = getelementptr ptr, ptr %set, i64 %i
  %handle = load ptr, ptr %handle_at
  %pair = getelementptr %pair, ptr %pairs, i64 %i
  store ptr %name, ptr %pair
  %tensor_at = getelementptr %pair, ptr %pair, i64 0, i32 1
  store ptr %handle, ptr %tensor_at
  %next = add i64 %i, 1
  br label %head
done:
  store ptr %pairs, ptr %entries
  store i64 %count, ptr %entry_count
  ret i32 0
fail:
  ret i32 1
}
